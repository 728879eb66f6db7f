"""What is killed, cut and slowed down under running streams; a package, so that its stack ends with its last test."""
