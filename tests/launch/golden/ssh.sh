# Run wikitext-gpt2 on 2 hosts; made by drawbar submit.
# These start at the same time, and each ends with its connection:
ssh -T -F '/home/me/lab ssh' -o Port=2222 -o BatchMode=yes -o ControlMaster=no -o RemoteCommand=none -o ClearAllForwardings=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=3 -o AddressFamily=inet -- gpu1 'exec bash -l'
ssh -T -F '/home/me/lab ssh' -o Port=2222 -o BatchMode=yes -o ControlMaster=no -o RemoteCommand=none -o ClearAllForwardings=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=3 -o AddressFamily=inet -- me@gpu2 'exec bash -l'

# The bash of each host reads, over the connection:
export HF_HOME='/scratch/my cache'
{
module load cuda/12.4 || exit
source ~/venv/bin/activate
} < /dev/null
exec /opt/env/bin/python -P -m drawbar.jobs.node.ssh_host

# drawbar there reads one more line: in it config is the text below, and node the host's number: gpu1 is node 0; me@gpu2 is node 1.
# {"job": {"launch_id": "drawbar-\u2026", "node": 0, "names": ["gpu1", "me@gpu2"], "argv": ["/opt/env/bin/python", "-m", "drawbar", "train"], "config": "", "workdir": "/home/me/project", "environment": {"HF_TOKEN": "***", "NCCL_DEBUG": "***"}, "interface": "ib0", "program": null, "patience": 60}}
#
# run:
#   name: wikitext-gpt2
#
# train:
#   steps: 100
