{{- define "distop.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "distop.selector" -}}
app.kubernetes.io/name: distop
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "distop.labels" -}}
{{ include "distop.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "distop.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "distop.account" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if .Values.serviceAccount.create }}{{ include "distop.name" . }}{{ else }}default{{ end -}}
{{- end }}

{{- define "distop.sharedDir" -}}
{{- if .Values.sharedDir }}{{ .Values.sharedDir }}{{ else if .Values.tables.enabled }}{{ .Values.tables.mountPath }}/_distop{{ else }}{{ fail "sharedDir: name a folder or URL that all executors share, since tables.enabled is false" }}{{ end -}}
{{- end }}

{{- /* How each process reaches etcd: environment, mounts, volumes. */ -}}
{{- define "distop.etcd.env" -}}
- {name: DISTOP_CONFIG, value: /etc/distop/settings/distop.toml}
- {name: DISTOP_ETCD, value: {{ join "," .Values.etcd.endpoints | quote }}}
{{- with .Values.etcd.namespace }}
- {name: DISTOP_NAMESPACE, value: {{ . | quote }}}
{{- end }}
{{- with .Values.etcd.user }}
- {name: DISTOP_USER, value: {{ . | quote }}}
- {name: DISTOP_PASSWORD_FILE, value: /etc/distop/etcd-password/password}
{{- end }}
{{- if .Values.etcd.tlsSecret }}
- {name: DISTOP_CACERT, value: /etc/distop/etcd-tls/ca.crt}
{{- if .Values.etcd.clientCertificate }}
- {name: DISTOP_CERT, value: /etc/distop/etcd-tls/tls.crt}
- {name: DISTOP_KEY, value: /etc/distop/etcd-tls/tls.key}
{{- end }}
{{- end }}
- {name: DISTOP_LOG_FORMAT, value: json}
{{- end }}

{{- define "distop.etcd.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: settings, mountPath: /etc/distop/settings, readOnly: true}
{{- if .Values.etcd.user }}
- {name: etcd-password, mountPath: /etc/distop/etcd-password, readOnly: true}
{{- end }}
{{- if .Values.etcd.tlsSecret }}
- {name: etcd-tls, mountPath: /etc/distop/etcd-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "distop.etcd.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: settings, configMap: {name: {{ include "distop.name" . }}-settings}}
{{- if .Values.etcd.user }}
- {name: etcd-password, secret: {secretName: {{ required "etcd.passwordSecret: name the secret with the password of etcd.user" .Values.etcd.passwordSecret }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.etcd.tlsSecret }}
- {name: etcd-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- define "distop.container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Where the pods of a workload run. Gets its values. */ -}}
{{- define "distop.placement" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $ $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* What pods may reach if it is limited: DNS, etcd's ports, each other, and the rules of the values. */ -}}
{{- define "distop.egress" -}}
{{- with .Values.networkPolicy.egress }}
egress:
  - ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
  - ports:
      {{- $ports := list }}
      {{- range $.Values.etcd.endpoints }}
      {{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default "2379" | int) }}
      {{- end }}
      {{- range $ports | uniq }}
      - {port: {{ . }}}
      {{- end }}
  - to:
      - podSelector: {matchLabels: {app.kubernetes.io/name: distop, app.kubernetes.io/instance: {{ $.Release.Name }}}}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
