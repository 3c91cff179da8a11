"""The status pages over HTTP: the server, its TLS settings, and the files that a browser loads."""
