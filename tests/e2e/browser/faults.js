// What is visible of the page, and what is wrong with it: a list of sentences. `least`: the contrast of texts.
((least) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  // Colours of any notation, laid over one another from the lowest on, as [red, green, blue] of 0 to 255.
  const mixed = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
    }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const channel = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (rgb) => rgb.map(channel).reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const grounds = (element) => {
    const found = [];
    for (let at = element; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
    return ["white", ...found];
  };
  const seen = (element) => element.checkVisibility({ checkOpacity: true, visibilityProperty: true })
    && element.getBoundingClientRect().width > 1;
  const told = (element) => `<${element.tagName.toLowerCase()} id="${element.id}" class="${element.className}">`;
  const faults = [];
  for (const element of document.body.querySelectorAll("*")) {
    const texts = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!texts || !seen(element) || element.closest("svg, [disabled]")) continue;
    const behind = mixed(grounds(element));
    const ratio = contrast(mixed([`rgb(${behind.join(" ")})`, getComputedStyle(element).color]), behind);
    const text = element.textContent.trim().slice(0, 40);
    if (ratio < least) faults.push(`${told(element)} ${text}: contrast ${ratio.toFixed(2)}`);
  }
  for (const image of document.querySelectorAll("img:not([alt])")) faults.push(`${told(image)}: no alt`);
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  const twice = ids.filter((id, index) => ids.indexOf(id) !== index);
  for (const id of new Set(twice)) faults.push(`id ${id} is there twice`);
  for (const name of ["aria-controls", "aria-labelledby", "aria-describedby"]) {
    for (const element of document.querySelectorAll(`[${name}]`)) {
      const lost = element.getAttribute(name).split(" ").filter((id) => !document.getElementById(id));
      if (lost.length) faults.push(`${told(element)}: ${name} names ${lost}`);
    }
  }
  let before = 0;
  for (const heading of [...document.querySelectorAll("h1, h2, h3, h4")].filter(seen)) {
    const level = Number(heading.tagName[1]);
    if (level > before + 1) faults.push(`${told(heading)}: a heading of level ${level} follows one of ${before}`);
    before = level;
  }
  const wide = [document.documentElement, ...document.querySelectorAll("main, main > section, header")].filter(seen);
  for (const part of wide) {
    if (part.scrollWidth > part.clientWidth) faults.push(`${told(part)} scrolls sideways: ${part.scrollWidth} px`);
  }
  return faults;
})
