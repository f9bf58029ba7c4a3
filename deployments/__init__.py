"""The Ray Serve app: HTTP gateway, target replicas, retrieval and valuation deployments."""
