// Stores conversations in this browser's IndexedDB: heads, which the list and its search read, and bodies with all messages.

import { Conversation } from "./conversation.js";

const DATABASE = "motet";
const VERSION = 1;
const SEARCHED = 200_000; // characters of a conversation that a search sees

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    request.onupgradeneeded = () => {
      for (const name of ["heads", "bodies"]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const done = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });

// Returns the heads, newest first: {id, name, updated, text}.
export async function listHeads() {
  const heads = await result((await database()).transaction("heads").objectStore("heads").getAll());
  return heads.sort((a, b) => b.updated - a.updated);
}

// Returns a stored conversation, or null.
export async function read(id) {
  const record = await result((await database()).transaction("bodies").objectStore("bodies").get(id));
  return record ? Conversation.from(record) : null;
}

// Writes a conversation. Messages that another tab has stored meanwhile are kept.
export async function write(conversation) {
  const transaction = (await database()).transaction(["heads", "bodies"], "readwrite");
  const bodies = transaction.objectStore("bodies");
  const { id, name, updated, text } = conversation;
  const record = conversation.toRecord();
  const stored = await result(bodies.get(id));
  record.nodes = [...conversation.missingFrom(stored?.nodes ?? []), ...record.nodes];
  bodies.put(record);
  transaction.objectStore("heads").put({ id, name, updated, text: text.slice(0, SEARCHED) });
  await done(transaction);
}

export async function erase(id) {
  const transaction = (await database()).transaction(["heads", "bodies"], "readwrite");
  for (const name of ["heads", "bodies"]) transaction.objectStore(name).delete(id);
  await done(transaction);
}
