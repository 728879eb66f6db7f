"""Every feature under every death; a package, so that its processes end with the last test here."""
