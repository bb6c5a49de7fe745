{{- define "ultraep.selector" -}}
app.kubernetes.io/name: ultraep
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ultraep.labels" -}}
{{ include "ultraep.selector" . }}
app.kubernetes.io/part-of: ultraep
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Everything of a pod but its containers. */ -}}
{{- define "ultraep.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false  # vLLM reads variables named VLLM_*
terminationGracePeriodSeconds: 60
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: shared-memory
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}  # counts against the container's memory
  - name: model
    persistentVolumeClaim:
      claimName: {{ .Values.model.claim }}
      readOnly: true
  - name: home
    emptyDir: {}
  - name: tmp
    emptyDir: {}
{{- end }}

{{- /* Of every engine: image, mounts, what it may do. */ -}}
{{- define "ultraep.engine" -}}
{{- $tag := .Values.image.tag | default (eq .Values.device "cpu" | ternary (print .Values.engine "-cpu") .Values.engine) -}}
image: {{ .Values.image.repository }}:{{ $tag }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources:
  requests:
    cpu: {{ .Values.cpu | quote }}
    memory: {{ .Values.memory }}
    {{- include "ultraep.devices" . | nindent 4 }}
  limits:
    {{- if eq (int .Values.hosts) 1 }}
    cpu: {{ .Values.cpu | quote }}
    {{- end }}
    memory: {{ .Values.memory }}
    {{- include "ultraep.devices" . | nindent 4 }}
securityContext:
  {{- include "ultraep.locked" . | nindent 2 }}
volumeMounts:
  - name: shared-memory
    mountPath: /dev/shm
  - name: model
    mountPath: /models/model
    readOnly: true
  - name: home
    mountPath: /home/ultraep
  - name: tmp
    mountPath: /tmp
{{- end }}

{{- define "ultraep.devices" -}}
{{- if eq .Values.device "gpu" }}nvidia.com/gpu: {{ .Values.ranksPerHost | quote }}{{ end }}
{{- range $name, $count := .Values.extraResources }}
{{ $name }}: {{ $count | quote }}
{{- end }}
{{- end }}

{{- define "ultraep.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "ultraep.flags" -}}
{{- $ranks := mul .Values.hosts .Values.ranksPerHost -}}
- {{ .Values.engine }}
- /models/model
- --served-model-name={{ .Values.model.name }}
- --host=0.0.0.0
- --port=8000
{{- if .Values.parallelFlags }}
{{- range .Values.parallelFlags }}
- {{ . | quote }}
{{- end }}
{{- else if eq .Values.engine "sglang" }}
- --tp-size={{ $ranks }}
- --ep-size={{ $ranks }}
{{- if gt (int .Values.hosts) 1 }}
- --nnodes=$(LWS_GROUP_SIZE)
- --node-rank=$(LWS_WORKER_INDEX)
- --dist-init-addr=$(LWS_LEADER_ADDRESS):13345
{{- end }}
{{- else if gt (int .Values.hosts) 1 }}
- --data-parallel-size={{ $ranks }}
- --data-parallel-size-local={{ .Values.ranksPerHost }}
- --data-parallel-address=$(LWS_LEADER_ADDRESS)
- --data-parallel-rpc-port=13345
- --enable-expert-parallel
{{- else }}
- --tensor-parallel-size={{ $ranks }}
- --enable-expert-parallel
{{- end }}
- --sidecar-host=0.0.0.0
{{- range .Values.flags }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "ultraep.env" -}}
- name: HF_HUB_OFFLINE
  value: "1"
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ultraep.token" -}}
- name: ULTRAEP_CONTROL_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.controlToken.secret }}
      key: {{ .Values.controlToken.key }}
{{- end }}

{{- /* The server answers: of the first host's engine. */ -}}
{{- define "ultraep.alive" -}}
startupProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 10
  timeoutSeconds: 30
  failureThreshold: {{ mul .Values.loadMinutes 6 }}
livenessProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 10
  timeoutSeconds: 30
  failureThreshold: 6
{{- end }}

{{- /* Every rank of the host has joined and is alive. */ -}}
{{- define "ultraep.ready" -}}
readinessProbe:
  httpGet:
    path: /readyz
    port: sidecar
  periodSeconds: 5
  timeoutSeconds: 10
{{- end }}
