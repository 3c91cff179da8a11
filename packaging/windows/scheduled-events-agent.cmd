@"%~dp0..\python\python.exe" -I -m scheduled_events_agent %*
