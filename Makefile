# The doors for people. Everything else is behind `cargo xtask`.

PREFIX ?= /usr/local
CARGO ?= cargo
UNITS ?= $(PREFIX)/lib/systemd/system

.PHONY: all demo test install setup clean

all:
	$(CARGO) build --release --bin hotspare

setup:
	@scripts/setup

# Kill a Redis and see what its clients see.
demo: setup
	$(CARGO) build --quiet --release --bin hotspare
	target/release/hotspare demo

# What CI runs.
test: setup
	$(CARGO) xtask ci

install: all
	install -D -m 755 target/release/hotspare $(DESTDIR)$(PREFIX)/bin/hotspare
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	target/release/hotspare man $(DESTDIR)$(PREFIX)/share/man/man1
	@for shell in bash:bash-completion/completions/hotspare zsh:zsh/site-functions/_hotspare \
	    fish:fish/vendor_completions.d/hotspare.fish; do \
	    file=$(DESTDIR)$(PREFIX)/share/$${shell#*:}; install -d $$(dirname $$file); \
	    target/release/hotspare completions $${shell%%:*} > $$file; echo $$file; done
	@for unit in hotspare-spare.service hotspare@.service; do \
	    file=$(DESTDIR)$(UNITS)/$$unit; install -d $$(dirname $$file); \
	    sed 's|/usr/local/bin/|$(PREFIX)/bin/|' packaging/systemd/$$unit > $$file; echo $$file; done
	install -D -m 644 packaging/prometheus/alerts.yml \
	    $(DESTDIR)$(PREFIX)/share/hotspare/prometheus-alerts.yml
	install -D -m 644 packaging/grafana/hotspare.json \
	    $(DESTDIR)$(PREFIX)/share/hotspare/grafana-dashboard.json

clean:
	$(CARGO) clean
