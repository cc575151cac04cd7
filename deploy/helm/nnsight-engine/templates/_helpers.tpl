{{- define "nnsight-engine.name" -}}
{{- /* A Service's name may have 63 characters, a release's 53. */ -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "nnsight-engine.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "nnsight-engine.labels" -}}
{{ include "nnsight-engine.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "nnsight-engine.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{/* "yes" where there may be more than one replica. */}}
{{- define "nnsight-engine.several" -}}
{{- if or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled }}yes{{ end -}}
{{- end }}

{{/* "yes" where pods old and new can run side by side: they share no volume that one node has, and no SQLite. */}}
{{- define "nnsight-engine.rolls" -}}
{{- $data := .Values.persistence.data }}
{{- $models := .Values.persistence.models }}
{{- $database := or .Values.database.url .Values.database.existingSecret }}
{{- $dataShared := or (not $data.enabled) (has "ReadWriteMany" $data.accessModes) }}
{{- $modelsShared := or (not $models.enabled) (has "ReadWriteMany" $models.accessModes) (has "ReadOnlyMany" $models.accessModes) }}
{{- if and $database $dataShared $modelsShared }}yes{{ end -}}
{{- end }}

{{- define "nnsight-engine.check" -}}
{{- if include "nnsight-engine.several" . }}
{{- if not (or .Values.database.url .Values.database.existingSecret) }}
{{- fail "several replicas share jobs and keys in one database: set database.url or database.existingSecret" }}
{{- end }}
{{- if not (and .Values.persistence.data.enabled (has "ReadWriteMany" .Values.persistence.data.accessModes)) }}
{{- fail "several replicas share the files of jobs: persistence.data.accessModes must have ReadWriteMany" }}
{{- end }}
{{- if not (include "nnsight-engine.rolls" .) }}
{{- fail "several replicas share the models: persistence.models.accessModes must have ReadWriteMany or ReadOnlyMany, or persistence.models.enabled be false" }}
{{- end }}
{{- end }}
{{- if and (eq (dig "type" "" .Values.strategy) "RollingUpdate") (not (include "nnsight-engine.rolls" .)) }}
{{- fail "strategy.type RollingUpdate has two pods at once, on one volume or one SQLite: Recreate, or a database and volumes that are ReadWriteMany" }}
{{- end }}
{{- $resultBytes := dig "result_store_bytes" 2147483648 .Values.settings | float64 }}
{{- if gt $resultBytes (include "nnsight-engine.bytes" .Values.persistence.results | float64) }}
{{- fail (printf "persistence.results is %s, and results may take %.0f bytes (settings.result_store_bytes): a pod that exceeds its volume is evicted" .Values.persistence.results $resultBytes) }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.enabled needs ingress.host" }}
{{- end }}
{{- end }}

{{/* A quantity of Kubernetes', 3Gi, in bytes. */}}
{{- define "nnsight-engine.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]*$" .)) -}}
{{- end }}

{{/* Seconds for which the server ends what runs; settings may say so, else the server's own default. */}}
{{- define "nnsight-engine.drain" -}}
{{- dig "drain_timeout_s" 30 .Values.settings | float64 | ceil | int -}}
{{- end }}

{{- define "nnsight-engine.keys" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "nnsight-engine.name" .)) }}
{{- end }}

{{- define "nnsight-engine.env" -}}
{{- $name := include "nnsight-engine.name" . -}}
{{- range $setting, $value := .Values.settings }}
- name: NNSIGHT_ENGINE_{{ upper $setting }}
  {{- /* A whole number of JSON's is a float to Go, which would write a large one as 1e+09. */}}
  value: {{ if and (kindIs "float64" $value) (eq $value (floor $value)) }}{{ int64 $value | toString | quote }}{{ else }}{{ toString $value | quote }}{{ end }}
{{- end }}
{{- if or .Values.database.url .Values.database.existingSecret }}
- name: NNSIGHT_ENGINE_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.database.existingSecret | default (printf "%s-database" $name) }}, key: url}}
{{- end }}
{{- if or .Values.redis.url .Values.redis.existingSecret }}
- name: NNSIGHT_ENGINE_LIMITS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.existingSecret | default (printf "%s-redis" $name) }}, key: url}}
{{- end }}
{{- if .Values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.model.tokenSecret }}, key: HF_TOKEN}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "nnsight-engine.mounts" -}}
- {name: data, mountPath: /data}
- {name: models, mountPath: /data/models}
- {name: cache, mountPath: /data/cache}
- {name: results, mountPath: /data/results}
- {name: temporary, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
