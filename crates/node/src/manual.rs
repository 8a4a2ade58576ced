//! What the program tells about itself: examples, manual pages, completions for shells.

use std::fs::{self, File};
use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::Cli;

/// Examples below the options of each command.
pub mod help {
    /// Of `run`.
    pub const RUN: &str = "\
Examples:
  One guest, one spare, its data directory travelling with it:
    hotspare run --spare beta:7070 --keys keys/ --name alpha \\
        --service-address 10.0.0.50/24 --files replicate:/srv/redis \\
        --directory /srv/redis -- redis-server --bind 10.0.0.50

  A batch job without an address, a checkpoint each second:
    hotspare run --spare beta:7070 --keys keys/ --name alpha --epoch 1s \\
        --files replicate:/srv/out -- /usr/local/bin/simulate /srv/out

  Clients notice no failover, and wait some milliseconds for each reply:
    hotspare run --guarantee output-commit --spare beta:7070 --keys keys/ --name alpha \\
        --service-address 10.0.0.50/24 -- memcached -u nobody -l 10.0.0.50

  One host at a time speaks for the guest, whatever is cut off (the spare has the same --arbiter):
    hotspare run --arbiter etcd://etcd1:2379,etcd2:2379/hotspare --guarantee output-commit \\
        --spare beta:7070 --keys keys/ --name alpha --service-address 10.0.0.50/24 -- CMD

  Every 5 s a checkpoint goes to S3 as well, from which `hotspare restore` starts it on any host:
    hotspare run --store s3://bucket/hotspare --keep 48h --store-key /etc/hotspare/store.key \\
        --spare beta:7070 --keys keys/ --name alpha -- CMD

  Spares may also dial in, also later:
    hotspare run --listen 0.0.0.0:7070 --keys keys/ --name alpha -- CMD

`hotspare check -- CMD` says beforehand whether CMD can be protected. The exit status is the
guest's; 75 if another host has taken over, 125 if Hotspare itself failed.";

    /// Of `spare`.
    pub const SPARE: &str = "\
Examples:
  Wait for a primary:
    hotspare spare --listen 0.0.0.0:7070 --keys keys/ --name beta

  Join one that runs already, and be joined by others later:
    hotspare spare --join alpha:7070 --listen 0.0.0.0:7070 --keys keys/ --name beta

  Move a cloud address at a takeover:
    hotspare spare --listen 0.0.0.0:7070 --keys keys/ --name beta \\
        --takeover-hook '/usr/local/bin/move-address \"$HOTSPARE_ADDRESS\"'

  Try it every ten minutes, and let Prometheus see how that goes:
    hotspare spare --listen 0.0.0.0:7070 --keys keys/ --name beta --metrics 9707 \\
        --rehearse 10m --probe 'redis-cli -h $HOTSPARE_ADDRESS ping'";

    /// Of `restore`.
    pub const RESTORE: &str = "\
Examples:
  The newest checkpoint, on this host, with a spare again:
    hotspare restore --spare beta:7070 --keys keys/ --name alpha file:///srv/checkpoints redis

  As it was at half past six, beside the one that serves, to look at it:
    hotspare restore --at 2026-11-22T18:30:00 --service-address 10.0.0.99/24 --rename redis-then \\
        --insecure s3://bucket/hotspare redis

It is refused where kernel, processor features or the program's files are not what they were; each
difference is named. Without --store nothing more is stored.";

    /// Of `inspect`.
    pub const INSPECT: &str = "\
Examples:
  hotspare inspect file:///srv/checkpoints redis
  hotspare inspect --at 1200 --since 1100 s3://bucket/hotspare redis   what has changed
  hotspare inspect --verify s3://bucket/hotspare redis                 reads and checks every byte";

    /// Of `check`.
    pub const CHECK: &str = "\
Examples:
  hotspare check                         each feature of the kernel that is needed
  hotspare check -- redis-server         runs it for 2 s, lists all that is in the way
  hotspare check --for 20s --files replicate:/srv/redis -- redis-server --dir /srv/redis
  hotspare check --pid 4711              looks at a running program, without touching it

Exit status: 0 nothing is in the way, 2 something is, 1 it could not be found out.";

    /// Of `keys`.
    pub const KEYS: &str = "\
Example:
  hotspare keys keys/ alpha beta
Then copy ca.crt, alpha.crt and alpha.key to alpha, ca.crt, beta.crt and beta.key to beta. Keep
ca.key, which makes further hosts, on neither.";

    /// Of `status`.
    pub const STATUS: &str = "\
Examples:
  hotspare status
  hotspare status --json | jq -r 'select(.role == \"primary\") | .ready'";

    /// Of `switchover`.
    pub const SWITCHOVER: &str = "\
Example, on the host of the primary:
  hotspare switchover --guest redis
Exit status: 0 moved, 1 not moved and why.";

    /// Of `rehearse`.
    pub const REHEARSE: &str = "\
Examples, on the host of a spare:
  hotspare rehearse --probe 'redis-cli -h $HOTSPARE_ADDRESS ping | grep -q PONG'
  hotspare rehearse --for 10s --json | jq .finalise_ms
  hotspare spare --listen 0.0.0.0:7070 --keys keys/ --name beta \\
      --rehearse 10m --probe 'curl -fs http://$HOTSPARE_ADDRESS/health'

It takes as much memory as the guest once more, while it lasts. Exit status: 0 passed, 1 failed and
why, 2 nothing was tried (no ghost yet, memory is short, a takeover came first).";

    /// Of `events`.
    pub const EVENTS: &str = "\
Examples:
  hotspare events
  hotspare events --json --epochs | jq .pause_us
  hotspare events --at beta:7071 --keys keys/ --name alpha";

    /// Of `pause`.
    pub const PAUSE: &str = "\
Example:
  hotspare pause --guest redis --reason 'the network between the hosts is rebuilt'
  hotspare resume --guest redis
Under output-commit nothing is held back meanwhile. Exit status: 0 done, 1 not done and why.";

    /// Of `history`.
    pub const HISTORY: &str = "\
Examples:
  hotspare history
  hotspare history --guest redis
  hotspare history --json | jq -r 'select(.event == \"failover\") | [.at, .cause, .lost] | @tsv'

Each host has its own: a failover is in that of the new primary, a fence in that of the old one.
Exit status: 0 there is something, 1 there is nothing.";

    /// Of `demo`.
    pub const DEMO: &str = "\
Example:
  hotspare demo --keys 10000 --epoch 50ms --picture outage.svg";

    /// Of `completions`.
    pub const COMPLETIONS: &str = "\
Examples:
  hotspare completions bash > /usr/share/bash-completion/completions/hotspare
  hotspare completions fish > /usr/share/fish/vendor_completions.d/hotspare.fish";
}

/// Prints a completion script.
pub fn completions(shell: clap_complete::Shell) -> u8 {
    clap_complete::generate(shell, &mut Cli::command(), "hotspare", &mut std::io::stdout());
    0
}

/// Writes `hotspare.1` and a page for each command.
pub fn pages(directory: &Path) -> anyhow::Result<u8> {
    fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let mut command = Cli::command();
    command.build();
    write_page(directory, "hotspare", &command)?;
    for one in command.get_subcommands().filter(|one| one.get_name() != "help") {
        let name = format!("hotspare-{}", one.get_name());
        // clap's commands want names that live as long as the program.
        let page = one.clone().name(String::leak(name.clone()) as &'static str);
        write_page(directory, &name, &page)?;
    }
    Ok(0)
}

fn write_page(directory: &Path, name: &str, command: &clap::Command) -> anyhow::Result<()> {
    let path = directory.join(format!("{name}.1"));
    let failed = || format!("write {}", path.display());
    let mut file = File::create(&path).with_context(failed)?;
    clap_mangen::Man::new(command.clone()).render(&mut file).with_context(failed)?;
    println!("{}", path.display());
    Ok(())
}
