// Converts between files and data URIs.

export function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// Returns the media type and the base64 of a data URI.
export function partsOf(uri) {
  const [head, data] = uri.split(",", 2);
  return { type: /^data:([^;]*)/.exec(head)[1], data };
}

// Returns the Blob of a data URI in base64. (The page may not fetch `data:` addresses.)
export function blobOf(uri) {
  const { type, data } = partsOf(uri);
  return new Blob([Uint8Array.from(atob(data), (char) => char.charCodeAt(0))], { type });
}
