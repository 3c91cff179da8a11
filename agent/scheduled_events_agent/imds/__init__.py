"""Azure's side: what the metadata service says, and the requests to it.

document.py     the Scheduled Events document as frozen values (pure)
compare.py      what a document changes in the known events: seen, missing, gone, renamed (pure)
text.py         cleaning of foreign text, JSON without ambiguous values (pure)
guest_proxy.py  the proxy that Azure can put in front of the service: signs of it, and hints
clock.py        whether this VM's clock is wrong, by the Date of the answers (pure)
endpoint.py     addresses of the service, as a policy writes them (pure)
client.py       fetch the document, post approvals, ask for this VM's identity
api_version.py  which api-version to ask for, and the fallback if the newest one fails (pure)
"""
