@"%~dp0..\python\python.exe" -I -m agent %*
