# Entry points; what they do is in scripts/ and xtask/. `make` builds, `make help` lists the others.

CARGO ?= cargo
# System tests wait more than they compute (38 % of two cores with two at once).
TEST_THREADS ?= 3
# The tests mount file systems and make loop devices: without root they run under sudo.
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -E env "PATH=$$PATH")

# Where `make install` puts things, and, for packages, a directory before all of that.
PREFIX ?= /usr/local
DESTDIR ?=

.PHONY: build help demo test check bench lab install dist wheel clean

build:
	$(CARGO) build --release -p firn -p firn-preload -p firn-c

help:
	@echo 'make         build what is installed; needs no root'
	@echo 'make demo    set up, build, mount; a solver and firnd are killed, and it ends with the same result'
	@echo 'make test    set up, run every test (as root: the tests mount file systems), and make check'
	@echo 'make check   formatting, words of comments, lints, documentation, and what the dependencies are'
	@echo 'make bench   measure both frontends, checkpoints, restarts, spilling and commits beside their baselines'
	@echo 'make lab     make the figures of the papers anew, beside models of their machines: hours (lab/README.md)'
	@echo 'make install install what was built to PREFIX (/usr/local), below DESTDIR; builds nothing'
	@echo 'make dist    set up, build for glibc 2.28, and make a tarball, a .deb, an .rpm and a wheel in target/dist'
	@echo 'make wheel   the same for Python alone: a wheel in target/dist that `pip install` takes'
	@echo 'make clean   remove what was built'

demo:
	scripts/setup --build
	$(CARGO) build --release -p firn -p firn-example-heat -p firn-testfs
	scripts/demo

test:
	scripts/setup
	$(CARGO) build -p firn -p firn-preload -p firn-c -p firn-bench -p firn-example-heat -p firn-testfs
	$(AS_ROOT) $(CARGO) test --workspace --no-fail-fast -- --test-threads=$(TEST_THREADS)
	$(CARGO) xtask campaign fuzz
	$(MAKE) check

check:
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path lab/Cargo.toml --check
	$(CARGO) xtask words
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --document-private-items
	PATH="$(CURDIR)/target/tools/bin:$$PATH" $(CARGO) deny check bans licenses sources

bench:
	$(CARGO) build --release -p firn -p firn-preload
	$(CARGO) build --release -p firn-bench
	target/release/firn bench ingest
	target/release/firn bench checkpoint
	target/release/firn bench read
	target/release/firn bench meta
	target/release/firn bench restart
	target/release/firn bench spill
	target/release/firn bench drain
	target/release/firn bench commit

lab:
	$(CARGO) run --release --manifest-path lab/Cargo.toml -- all

# Copies only, so that no compiler runs as root.
install:
	scripts/install --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

dist:
	scripts/setup --dist
	scripts/dist

wheel:
	scripts/setup --dist
	scripts/dist --only wheel

clean:
	$(CARGO) clean
