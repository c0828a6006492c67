package pathscope

import "sync"

// Default returns the entries that are protected in every scope, whatever
// documents say: version control's own state, policy, CI and workflow
// definitions, code ownership and IAM (H-045). Documents add to it and cannot
// take from it. The caller owns the returned slice.
func Default() []string {
	return []string{
		// Version control.
		"**/.git/", ".gitmodules",
		// Our own documents, and policy text of any engine.
		".numinance/", "**/*.cedar", "**/*.rego", "numinance.lock",
		// Code ownership and rules of the code host.
		"**/CODEOWNERS", ".github/rulesets/", ".github/settings.yml",
		// CI and workflow definitions.
		".github/workflows/", ".github/actions/", ".gitea/workflows/", ".forgejo/workflows/",
		".gitlab-ci.yml", ".gitlab/ci/", ".gitlab/", "**/Jenkinsfile", ".ci/", ".circleci/", ".travis.yml",
		"azure-pipelines.yml", "azure-pipelines.yaml", ".azure-pipelines/", "bitbucket-pipelines.yml",
		".buildkite/", ".drone.yml", ".woodpecker.yml", ".woodpecker/", ".tekton/", "appveyor.yml",
		".appveyor.yml", "cloudbuild.yaml", "cloudbuild.yml", "buildspec.yml",
		// Identity and access management.
		"iam/", "infra/iam/", "terraform/iam/", "deploy/iam/",
		"**/iam.tf", "**/iam.yaml", "**/iam.yml", "**/iam.json",
	}
}

// builtin is Default, ready to match; it is parsed once and never changes.
var builtin = sync.OnceValue(func() []guard { return guards(Default()) })
