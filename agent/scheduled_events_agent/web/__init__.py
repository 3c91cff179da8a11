"""The status page, metrics and health over HTTP.

server.py     the server: limits on clients, time and size
endpoints.py  what it answers at each path
static.py     the files that a browser loads
tls.py        its TLS, read again when the files change
"""
