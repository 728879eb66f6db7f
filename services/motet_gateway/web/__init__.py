"""The web page: static files, served without a build step."""
