"""`bmburst serve`: a server of OpenAI's chat completions that answers one question at a time on all ranks.

- `protocol.py`: fields of a request, objects of a response, errors
- `worker.py`: answers questions on every rank, with the cache of earlier ones
- `http.py`: the server, in a thread of rank 0
"""
