"""Drive llama.cpp: a llama-server that runs already, or one that the host starts."""
