# `make demo` and `make test` set up everything they need in .venv; see `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/*.?pp native/*/*.?pp)
# Whatever the compiled module or the set of dependencies is made from.
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lowest check github format docs notebooks wheel wheels sdist tagged bench siege soak sanitize \
	fuzz stub requirements clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## A real grocery log, a model trained on it, what it recommends; then search 2 M items
	$(BIN)/python -m examples.grocery out/grocery.png
	$(BIN)/python -m examples.recommend
	$(BIN)/python -m examples.search

PROCESSES ?= 2
test: $(VENV)/dev.stamp ## Run the tests, in PROCESSES=2 at once
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup

lowest: $(VENV)/dev.stamp ## Run tests with the lowest versions that are allowed; WITH='torch==2.13.0' takes others
	$(BIN)/python tests/support/lowest.py build/lowest $(WITH)

check: $(VENV)/dev.stamp ## Lint, formatting and types, C++ included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(MAKE) --no-print-directory github

SCHEMA := $(BIN)/check-jsonschema --quiet --builtin-schema
FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
github: $(VENV)/dev.stamp ## Check workflows, forms, the citation and the hooks; part of make check
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --no-progress --quiet .
	$(SCHEMA) vendor.dependabot .github/dependabot.yml
	$(SCHEMA) vendor.github-issue-forms $(FORMS)
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff
	$(BIN)/pre-commit validate-config

format: $(VENV)/dev.stamp ## Format all code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

docs: $(VENV)/dev.stamp ## Build the site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

notebooks: $(VENV)/dev.stamp ## Run the notebooks of the site anew, and keep what they print
	$(BIN)/python tests/support/notebooks.py

wheel: $(VENV)/dev.stamp ## Build the sdist and from it a wheel; search with that where NumPy is all there is
	$(BIN)/python tests/support/wheels.py dist

wheels: $(BIN)/python ## Build the wheels of a release for this kind of machine; on Linux that takes Docker
	$(INSTALL) cibuildwheel
	$(BIN)/python -m cibuildwheel --output-dir dist

sdist: $(BIN)/python ## Build the sdist of a release
	$(INSTALL) build
	$(BIN)/python -m build --sdist --outdir dist

tagged: ## Check that TAG=v0.2.0 is the version that is released, and that CHANGELOG.md has it
	$(PYTHON) tests/support/tagged.py $(TAG)

bench: $(VENV)/dev.stamp ## Measure search, and the data path at full size (about 5 minutes, 3 GB of disk)
	$(BIN)/python -m benchmarks.search
	$(BIN)/python -m benchmarks.data_path

MINUTES ?= 3
siege: $(VENV)/dev.stamp ## Besiege the service, MINUTES=3 for each store; writes docs/reliability.md
	$(BIN)/python -m benchmarks.siege --minutes $(MINUTES) --histories sqlite --out docs/measured/siege-sqlite.json
	$(BIN)/python -m benchmarks.siege --minutes $(MINUTES) --histories redis --out docs/measured/siege-redis.json
	$(BIN)/python -m benchmarks.siege.table

soak: $(VENV)/dev.stamp ## Change a catalogue while it is served and hurt, MINUTES=3; writes docs/catalogue.md
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --out docs/measured/soak.json
	$(BIN)/python -m benchmarks.soak.table

sanitize: $(VENV)/dev.stamp ## Run the tests of the core with address and undefined-behaviour checks
	rm -rf build/sanitized
	$(INSTALL) --no-deps --target build/sanitized --config-settings=build-dir=build/sanitize \
		--config-settings=cmake.define.RECPRUNE_SANITIZE=ON .
	LD_PRELOAD=$$(c++ -print-file-name=libasan.so):$$(c++ -print-file-name=libstdc++.so) \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/python tests/support/sanitized.py build/sanitized

fuzz: $(VENV)/dev.stamp ## Search for a disagreement with the oracle, and for a folder that does harm, for minutes
	RECPRUNE_FUZZ=20000 $(BIN)/python -m pytest tests/search/test_search.py -k "oracle or worth_pruning or long_lists"
	RECPRUNE_FUZZ=20000 $(BIN)/python -m pytest tests/search/test_search_batch.py -k company_is_answered
	RECPRUNE_FUZZ=20000 $(BIN)/python -m pytest tests/live/test_live_index.py -k whatever
	RECPRUNE_FUZZ=20000 $(BIN)/python -m pytest tests/test_strangers.py

stub: $(VENV)/dev.stamp ## Write the stub file of the compiled module anew
	$(BIN)/python -m nanobind.stubgen --quiet --module recprune._native --output-file src/recprune/_native.pyi

# The Python is that of the images. Hashes are those of every wheel of a version, whatever the machine.
LOCK := $(BIN)/uv pip compile --quiet --no-config --generate-hashes --constraint constraints.txt \
	--python-version 3.12 --python-platform x86_64-manylinux_2_28 --custom-compile-command 'make requirements'
requirements: $(VENV)/dev.stamp ## Write what the images install anew, by hash, from constraints.txt
	$(LOCK) --output-file deploy/requirements/build.txt deploy/requirements/build.in
	$(LOCK) --output-file deploy/requirements/serve.txt --extra serve --extra onnx pyproject.toml
	$(LOCK) --output-file deploy/requirements/ray.txt --extra ray-node pyproject.toml

clean: ## Remove everything that was built or installed here
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say which with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "No virtual environment: on Debian and Ubuntu, apt install python3-venv python3-dev"; exit 1; }

$(VENV)/demo.stamp: $(BIN)/python $(BUILD_INPUTS)
	$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(BIN)/python $(BUILD_INPUTS)
	$(INSTALL) --config-settings=cmake.define.RECPRUNE_WERROR=ON --editable '.[dev]'
	@touch $@ $(VENV)/demo.stamp
