// Stores conversations in this browser's IndexedDB: heads, which the list and its search read, bodies with all messages, and the
// files of the message that is being written.

import { Conversation } from "./conversation.js";

const DATABASE = "motet";
const VERSION = 2;
const SEARCHED = 200_000; // characters of a conversation that a search sees

let opened = null;
let asked = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    request.onupgradeneeded = () => {
      const known = request.result.objectStoreNames;
      for (const name of ["heads", "bodies", "drafts"]) if (!known.contains(name)) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => {
      // A newer page in another tab could not open it otherwise.
      request.result.onversionchange = () => {
        request.result.close();
        opened = null;
      };
      resolve(request.result);
    };
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

// Asks the browser, once, not to delete what is stored when its disk gets full.
function askToKeep() {
  asked ??= navigator.storage?.persist?.().catch(() => false) ?? true;
}

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
  askToKeep();
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

const DRAFT = "draft"; // the only id

// Returns the files of the message that is being written.
export async function readDraft() {
  const record = await result((await database()).transaction("drafts").objectStore("drafts").get(DRAFT));
  return record?.items ?? [];
}

export async function writeDraft(items) {
  const transaction = (await database()).transaction("drafts", "readwrite");
  transaction.objectStore("drafts").put({ id: DRAFT, items });
  await done(transaction);
}

export async function erase(id) {
  const transaction = (await database()).transaction(["heads", "bodies"], "readwrite");
  for (const name of ["heads", "bodies"]) transaction.objectStore(name).delete(id);
  await done(transaction);
}
