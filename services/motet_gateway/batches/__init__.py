"""Serve /v1/batches: answer the requests of a file, line by line, behind interactive traffic."""
