"""Decode untrusted media (sound, pictures, video) in confined child processes.

    parts = pool("sound").run("samples", data, limits, refuse=..., longest=60.0)   # on a thread
    result = await decoding(function, *args)   # runs `function` on a thread; cancelling kills its children

`pool` and `worker` are the service's side, `child` and `confine` the child's; `sound`, `picture`
and `video` are the decoders, which only children import. Frames between the two sides are msgspec's
JSON (`wire`); payloads go through a window of shared memory that parent and child map. Nothing is
unpickled: a compromised decoder must not be able to run code in the service. That rules out
multiprocessing, pebble and loky, whose results are pickled and whose children import the parent's
main module (and torch with it).
"""
