#!/bin/sh
# What a node of a cluster does; the cluster files call it, with this checkout in ~/valuspec and
# the output of deployments/secrets.sh in ~/secrets.
#
#   sh node.sh setup [PACKAGES]    install the pinned product into ~/venv, mount the shared folder;
#                                  PACKAGES are what Ray's autoscaler needs of the cloud
#   sh node.sh valkey              start Valkey, where there is none to use (head node)
#   sh node.sh head|worker [ARGS]  join Ray; ARGS go to `ray start`
#
# VALUSPEC_NFS (in ~/secrets/cluster-env) is an NFS export, "host:/path", for the trajectory log.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
. "$HOME/secrets/cluster-env"
PATH=$HOME/venv/bin:$PATH

setup() {
	if ! test -x ~/venv/bin/python; then
		sudo apt-get update
		sudo apt-get install -y python3-venv
		python3 -m venv ~/venv
	fi
	# faiss-cpu on GPU nodes as well: only retrieval searches, and it runs on a CPU node.
	pip install -c "$here/constraints.txt" "$here[cpu]" "$@"
	if ! grep -q cluster-env ~/.bashrc; then
		# shellcheck disable=SC2016 # expanded by the shell that reads .bashrc
		echo '. ~/secrets/cluster-env; export PATH=~/venv/bin:$PATH' >>~/.bashrc
	fi
	sudo mkdir -p /mnt/valuspec
	if test -n "${VALUSPEC_NFS:-}" && ! mountpoint -q /mnt/valuspec; then
		sudo apt-get install -y nfs-common
		sudo mount -t nfs4 "$VALUSPEC_NFS" /mnt/valuspec
	fi
	sudo mkdir -p /mnt/valuspec/log /mnt/valuspec/reports
	sudo chown "$(id -u)" /mnt/valuspec/log /mnt/valuspec/reports
}

valkey() {
	mkdir -p ~/valkey-data
	chmod 700 ~/valkey-data
	sudo docker rm -f valkey 2>/dev/null || true
	sudo docker run -d --name valkey --restart unless-stopped --network host --user "$(id -u)" \
		-v "$here/deployments/valkey/valkey.conf:/etc/valkey/valkey.conf:ro" \
		-v ~/secrets:/etc/valkey/secrets:ro -v ~/valkey-data:/data \
		valkey/valkey:9.1 valkey-server /etc/valkey/valkey.conf
}

join() {
	ulimit -n 65536
	ray start --metrics-export-port=8080 --disable-usage-stats "$@"
}

role=$1
shift
case $role in
setup) setup "$@" ;;
valkey) valkey ;;
# The dashboard stays on the loopback address: `ray dashboard` forwards it.
head) join --head --port=6379 --dashboard-host=127.0.0.1 \
	--autoscaling-config="$HOME/ray_bootstrap_config.yaml" "$@" ;;
worker) join --address="$RAY_HEAD_IP:6379" "$@" ;;
*)
	echo "node.sh: $role is none of setup, valkey, head, worker" >&2
	exit 2
	;;
esac
