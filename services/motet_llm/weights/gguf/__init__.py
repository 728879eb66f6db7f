"""Read GGUF files: configuration, tokenizer and tensors of the models that llama.cpp runs.

A GGUF file is complete: it states its model's shape, holds the vocabulary and the chat template
beside the tensors. Two ways lead to the loader, which reads folders:

* A folder with one `.gguf` beside the original model's config.json and tokenizer.json is a
  checkpoint like any other.
* A lone file becomes such a folder: `folder.make_folder(FILE, TARGET)` writes config.json,
  generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja out of the
  file's metadata, and links the file (all parts of a split one) beside them. TARGET then goes
  wherever a checkpoint folder goes: `--llm`, `motet plan`, the tokenizer. It takes a second or two
  and reads no tensor of size; a TARGET that was made of the same file is kept.

Programs without torch run that as a command, which prints the folder, or an error to stderr with
exit code 2:

    python -m motet_llm.weights.gguf FILE [TARGET]

Without TARGET the folder is `folder.default_folder(FILE)`, under `MOTET_CACHE`.

Below these, `header.read_header(FILE)` returns metadata and the places of the tensors,
`config.config_of(header)` the contents of config.json, `tokenizer.build_tokenizer(header)` the
tokenizer, and `file.GgufFile` the tensors by transformers' names.
"""
