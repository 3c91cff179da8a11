"""The agent as a process: the main loop and its threads.

Nothing here decides about events.

    daemon.py          starts threads, loops, stops
    inbox.py           what the threads put in and the engine's thread takes out
    poller.py          asks for the document, and who this VM is
    executor.py        one thread for each hook and each request to approve
    background.py      one thread for other work, such as the checks of a policy
    notifier.py        one thread for each target of notifications
    fleet.py           asks the store of the VMs that act together
    node.py            keeps the conditions of a Kubernetes node up to date
    policy_reader.py   reads the policy file again, and looks whether it has changed
    fallback.py        the policy that was accepted last, for a start whose policy file is bad
    service_status.py  what the service manager hears
    status_source.py   the status, of what all these publish
    watchdog.py        ends the process if it hangs
"""
