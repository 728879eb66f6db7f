"""Let the services of `motet up --survive` outlive their supervisor, and let the next one adopt them."""
