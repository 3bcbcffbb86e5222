# Run wikitext-gpt2 on 1 host; made by drawbar submit.
# These start at the same time, and each ends with its connection:
ssh -T -o BatchMode=yes -o ControlMaster=no -o RemoteCommand=none -o ClearAllForwardings=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=3 -o AddressFamily=inet -- gpu1 'exec bash'

# The bash of each host reads, over the connection:
exec /opt/env/bin/python -P -m drawbar.jobs.node.ssh_host

# drawbar there reads one more line: in it config is the text below, and node the host's number: gpu1 is node 0.
# {"job": {"launch_id": "drawbar-\u2026", "node": 0, "names": ["gpu1"], "argv": ["/opt/env/bin/python", "-m", "drawbar", "train"], "config": "", "workdir": "/home/me/project", "environment": {"HF_TOKEN": "***", "NCCL_DEBUG": "***"}, "interface": null, "program": null, "patience": 60}}
#
# run:
#   name: wikitext-gpt2
#
# train:
#   steps: 100
