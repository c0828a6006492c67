# Numinance. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
export CGO_ENABLED ?= 0
GO ?= go
TOOLS := bin/tools
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
BINARIES := numi numi-sandbox numi-init numi-verify
# -race needs a C compiler; without one the tests run without it and say so.
RACE := $(shell command -v gcc >/dev/null 2>&1 || command -v cc >/dev/null 2>&1 && echo -race)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

build: ## build the four binaries into bin/
	@mkdir -p bin
	@for b in $(BINARIES); do echo "build   $$b"; $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/$$b ./cmd/$$b || exit 1; done

demo: build ## run one governed Change from ticket to merge and print the receipt
	@bin/numi demo

test: build ## run all tests, as CI does
ifeq ($(RACE),)
	@echo "note    no C compiler found: the tests run without the race detector"
	$(GO) test ./...
else
	CGO_ENABLED=1 $(GO) test -race ./...
endif

check: tools ## regenerate and want an empty diff, lint the contract and the code
	@$(MAKE) --no-print-directory generate
	@git diff --exit-code --stat -- gen proto || { echo "check: gen/ differs from proto/; commit what 'make generate' wrote" >&2; exit 1; }
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo "check: run gofmt -w on these files" >&2; exit 1; }
	$(GO) vet ./...
	$(TOOLS)/staticcheck ./...

lint: tools ## lint the contract and the code without regenerating
	$(TOOLS)/protoimage -proto proto -o bin/image.binpb
	$(TOOLS)/buf lint bin/image.binpb --config buf.yaml
	$(GO) vet ./...
	$(TOOLS)/staticcheck ./...

tools: ## build the pinned development tools into bin/tools/
	@mkdir -p $(TOOLS)
	@cd tools && $(GO) build -o ../$(TOOLS)/ ./protoimage github.com/bufbuild/buf/cmd/buf google.golang.org/grpc/cmd/protoc-gen-go-grpc honnef.co/go/tools/cmd/staticcheck golang.org/x/perf/cmd/benchstat
	@$(GO) build -o $(TOOLS)/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go

generate: tools ## regenerate gen/ from proto/
	$(TOOLS)/protoimage -proto proto -o bin/image.binpb
	$(TOOLS)/buf lint bin/image.binpb --config buf.yaml
	$(TOOLS)/buf generate bin/image.binpb
	$(TOOLS)/protoimage -proto proto -strip -o gen/descriptors.binpb

fuzz: ## fuzz each parser and matcher for a short while
	@for p in $$($(GO) list ./...); do for f in $$($(GO) test -list '^Fuzz' $$p 2>/dev/null | grep ^Fuzz); do echo "fuzz    $$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime 15s $$p || exit 1; done; done

bench: ## measure the figures, side by side with what they are compared to
	@$(MAKE) --no-print-directory build || echo "note    not everything builds; what needs bin/numi is left out" >&2
	$(GO) run ./internal/testing/figures

clean: ## remove what was built
	rm -rf bin

.PHONY: help build demo test check lint tools generate fuzz bench clean
