# Every target works on a fresh machine: it needs Python 3.11 or newer with venv, and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 60
SEEDS ?= 10000
IN_WINE := tests/system/test_windows.py tests/system/test_windows_service.py tests/system/test_msi.py
LONGEST := $(addprefix tests/system/test_,package_life.py install_other.py packages.py systemd_service.py)

.PHONY: demo test lint audit faults simulation fuzz nightly soak bench recipes pictures system system-linux system-windows packages deb rpm helm msi release image repository clean

demo: $(VENV)/.ready          ## The main job, end to end, against the built-in simulator
	$(BIN)/scheduled-events-agent demo

test: $(VENV)/.ready          ## Unit, integration and end-to-end tests
	$(BIN)/python -m pytest -n 6 --dist worksteal

lint: $(VENV)/.ready          ## Style and types, for Linux and for Windows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --platform linux
	$(BIN)/mypy --platform win32

simulation: $(VENV)/.ready    ## Ten thousand lives of the agent, and a thousand fleets, under every kind of trouble; others with each commit
	$(BIN)/python tests/simulation --seeds $(SEEDS)
	$(BIN)/python tests/simulation --fleet --seeds $$(($(SEEDS) / 10))
	$(BIN)/python tests/simulation --fleet --no-ages --seeds $$(($(SEEDS) / 100))
	$(BIN)/python tests/simulation --fleet --leases --seeds $$(($(SEEDS) / 100))

audit: $(VENV)/.ready         ## Known vulnerabilities of what the packages bring (needs a database of them on the network)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --strict --disable-pip --requirement packaging/requirements.txt
	$(BIN)/pip-audit --strict --disable-pip --requirement packaging/windows/requirements.txt

faults: $(VENV)/.ready        ## The real agent without disk, memory, descriptors, clock (root on Linux: else in part)
	$(BIN)/python -m pytest -n 3 tests/faults

fuzz: $(VENV)/.ready          ## A million inputs for everything that reads what others wrote (about twenty minutes)
	nice $(BIN)/python tests/fuzz/fuzz.py

nightly: $(VENV)/.ready       ## What takes long: deep walks, ten thousand lives, a thousand fleets, a million inputs, all tests under Wine (root)
	$(BIN)/python -m pytest --timeout 3600 -m "nightly or hypothesis" --hypothesis-profile nightly tests
	$(MAKE) simulation fuzz

soak: $(VENV)/.ready          ## Whether the agent grows, at a hundred times its pace (MINUTES=60)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

bench: $(VENV)/.ready         ## Speed and size, onto docs/benchmarks.md (all committed; on a calm machine, or ANYWAY=1)
	$(BIN)/python -m benchmarks $(if $(ANYWAY),--anyway)

recipes: $(VENV)/.ready       ## What the cookbook's recipes save, measured with load (root; NAME=slurm: only this one; WRITE=1: onto the pages)
	$(BIN)/python tests/recipes/run_recipes.py $(if $(WRITE),--write) $(if $(filter command,$(origin NAME)),$(NAME))

pictures: $(VENV)/.ready      ## The documentation's pictures, into docs/pictures (root: the agent gets namespaces of its own)
	$(BIN)/python tests/fixtures/life_picture.py
	$(BIN)/python tests/system/pictures.py

system: system-linux system-windows   ## Tests in real surroundings (root: fetches them once; make -j2 halves the time)

system-linux: $(VENV)/.ready  ## In a booted Debian, and with the programs that hooks drain
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --timeout 900 \
		$(LONGEST) $(filter-out $(LONGEST) $(IN_WINE),$(sort $(wildcard tests/system/test_*.py)))

system-windows: $(VENV)/.ready ## Under a Windows Python, in Wine
	$(BIN)/python -m pytest --timeout 900 $(IN_WINE)

packages: deb rpm             ## Packages for Linux, both architectures, into dist/

deb: $(VENV)/.ready           ## For Debian and Ubuntu (needs dpkg-deb)
	$(BIN)/python packaging/build.py deb

rpm: $(VENV)/.ready           ## For RHEL, SLES and Azure Linux (needs rpmbuild; root on Debian gets it installed)
	$(BIN)/python packaging/build.py rpm

helm: $(VENV)/.ready          ## The Helm chart, into dist/
	$(BIN)/python packaging/build.py helm

msi: $(VENV)/.ready           ## For Windows (PYTHON_EMBED=FILE: the one that packaging/windows/python.toml names)
	$(BIN)/python packaging/windows/msi.py build

release: $(VENV)/.ready       ## All files of a release, into dist/ (PYTHON_EMBED=FILE: with the MSI; DRAFT=1: a try, without tag and addresses)
	$(BIN)/python packaging/release.py build $(if $(DRAFT),--draft)

image: $(VENV)/.ready         ## The container image (needs podman or docker; BASE=IMAGE: on another base)
	$(if $(BASE),BASE=$(BASE) )$(BIN)/python packaging/release.py image

repository: $(VENV)/.ready    ## apt and rpm repositories of what is in dist/ (KEY=FILE, private; FROM=DIR: older packages; INTO=dist/repository)
	$(BIN)/python packaging/repository.py $(if $(KEY),--key $(KEY)) $(if $(FROM),--from $(FROM)) $(if $(INTO),--into $(INTO))

$(VENV)/.ready: pyproject.toml
	@echo "Setting up, once: a virtual environment in $(VENV) ..."
	$(PYTHON) -m venv $(VENV)
	@echo "... and into it the agent with what it and its tests need, from the package index. This takes one to three minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache build dist
