# Two commands set everything up: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: train data test test-slow lint docs clean

train: $(VENV)/.core
	$(BIN)/flatout train shakespeare

# Readers and cleaning beyond text, JSON and CSV.
data: $(VENV)/.data

# Two processes more than there are cores, since many tests wait for others they have started; up to eight, as each
# holds torch.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" --dist worksteal \
		-n $$($(BIN)/python -c 'import os; print(min(8, (os.cpu_count() or 1) + 2))')

# The long campaigns: hundreds of kills and bit flips, thousands of fuzzed inputs. About half an hour.
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The site, in build/site; its search works without a server, too.
docs: $(VENV)/.docs
	$(BIN)/python docs/make_site.py
	@echo "the site: build/site/index.html"

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11"; echo "hint: run make with PYTHON=/path/to/a/newer/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing flatout into $(VENV) (torch is large: this takes a few minutes the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.data: $(VENV)/.core
	@echo "installing the readers for parquet, zst, Hugging Face datasets and crawls into $(VENV)"
	$(PIP) -e ".[data]"
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@echo "installing what builds the site into $(VENV)"
	$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the test tools into $(VENV)"
	$(PIP) -e ".[dev]"
	@touch $@
