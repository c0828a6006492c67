// Package hostservice answers what one plugin asks of the host: processes, tool
// decisions, blobs, checkpoints, signatures, credential handles and log lines,
// each only as far as the Config of that plugin's session allows. The plugin host
// serves one Service per plugin, on the plugin's own socket, which is the only
// identity there is; contexts/execution and the daemon make the Configs.
package hostservice
