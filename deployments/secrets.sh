#!/bin/sh
# Make the secrets of a cluster in FOLDER; what is there already stays.
#
#   sh deployments/secrets.sh ~/.config/valuspec/cluster
#
#   ray-token                 what every Ray process and client must show
#   api-keys                  tenant:key, one a line; add your tenants here
#   users.acl                 Valkey's users: serving (replicas), jobs, admin; passwords as hashes
#   ca-cert.pem, valkey-*.pem a certificate authority of this cluster's own, and Valkey's certificate
#   cluster-env               environment of the nodes' processes, with these users' passwords
#   admin-password            of Valkey's user admin
#
# Needs openssl and sha256sum. A password is replaced by deleting users.acl.
set -eu
umask 077
folder=${1:?usage: sh deployments/secrets.sh FOLDER}
template=$(cd "$(dirname "$0")" && pwd)/valkey/users.acl.template
mkdir -p "$folder"
cd "$folder"

random() { openssl rand -hex 32; }
hashed() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

test -e ray-token || random >ray-token
test -e api-keys || printf 'operator:%s\ndefault:%s\n' "$(random)" "$(random)" >api-keys

if ! test -e ca-cert.pem; then
	key='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
	# shellcheck disable=SC2086 # several words
	openssl req -x509 $key -days 3650 -subj "/CN=ValuSpec cluster" \
		-keyout ca-key.pem -out ca-cert.pem 2>/dev/null
	# shellcheck disable=SC2086
	openssl req $key -subj "/CN=valkey" -keyout valkey-key.pem -out valkey.csr 2>/dev/null
	openssl x509 -req -in valkey.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
		-days 3650 -out valkey-cert.pem 2>/dev/null
	rm -f valkey.csr ca-cert.srl ca-key.pem # it signs nothing else
fi

if ! test -e users.acl; then
	admin=$(random) serving=$(random) jobs=$(random)
	sed -e "s/#ADMIN/#$(hashed "$admin")/" -e "s/#SERVING/#$(hashed "$serving")/" \
		-e "s/#JOBS/#$(hashed "$jobs")/" "$template" >users.acl
	echo "$admin" >admin-password
	# The address is known when a node starts, so the certificate cannot name it; the authority is
	# this cluster's own, and signs nothing else.
	query='ssl_ca_certs=$HOME/secrets/ca-cert.pem&ssl_check_hostname=false'
	cat >cluster-env <<-END
		export RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1
		export RAY_AUTH_MODE=token
		export RAY_AUTH_TOKEN_PATH=\$HOME/secrets/ray-token
		export VALUSPEC_API_KEYS_FILE=\$HOME/secrets/api-keys
		export REDIS_URL="rediss://serving:$serving@\${RAY_HEAD_IP:-127.0.0.1}:6380/0?$query"
		export VALUSPEC_JOBS_REDIS_URL="rediss://jobs:$jobs@\${RAY_HEAD_IP:-127.0.0.1}:6380/0?$query"
	END
fi
echo "secrets are in $(pwd)"
