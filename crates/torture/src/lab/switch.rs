//! The switch between simulated hosts: a bridge in a network namespace of its own. Partitions
//! are drops of frames between two of its ports, so they hit ARP and any address alike.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use hotspare_kernel::Namespaces;
use hotspare_kernel::tun::Tun;

use super::wire::{Ends, Wire};
use super::{Doing, LabError};

#[derive(Debug)]
pub(super) struct Switch {
    namespaces: Namespaces,
}

impl Switch {
    pub(super) fn new() -> Result<Switch, LabError> {
        let namespaces =
            Namespaces::create(|| Ok(())).doing(|| "make the switch's namespace".to_owned())?;
        ip(
            &namespaces,
            "link add br0 type bridge stp_state 0 mcast_snooping 0\nlink set br0 up\n",
        )?;
        keep_from_firewall(&namespaces)?;
        Ok(Switch { namespaces })
    }

    /// Connects `host` by a new cable: its end is `eth0`, ours `port`.
    pub(super) fn plug(&self, port: &str, host: &Namespaces) -> Result<(), LabError> {
        let path = host.net_path();
        ip(
            &self.namespaces,
            &format!(
                "link add {port} type veth peer name eth0 netns {path}\n\
                 link set {port} master br0\nlink set {port} up\n"
            ),
        )
    }

    /// Connects `host` by a wire that this program carries frames over.
    pub(super) fn plug_wire(
        &self,
        port: &str,
        host: &Namespaces,
        wire: &Wire,
    ) -> Result<(), LabError> {
        let switch_end = tap(&self.namespaces, port)?;
        let host_end = tap(host, "eth0")?;
        let script = format!("link set {port} txqueuelen 10000 master br0\nlink set {port} up\n");
        ip(&self.namespaces, &script)?;
        ip(host, "link set eth0 txqueuelen 10000\n")?;
        wire.carry(Ends { host: host_end, switch: switch_end });
        Ok(())
    }

    /// Removes the cable, both ends.
    pub(super) fn unplug(&self, port: &str) -> Result<(), LabError> {
        ip(&self.namespaces, &format!("link delete {port}\n"))
    }

    pub(super) fn port_down(&self, port: &str) -> Result<(), LabError> {
        ip(&self.namespaces, &format!("link set {port} down\n"))
    }

    pub(super) fn port_up(&self, port: &str) -> Result<(), LabError> {
        ip(&self.namespaces, &format!("link set {port} up\n"))
    }

    pub(super) fn cut(&self, from: &str, to: &str) -> Result<(), LabError> {
        let script = format!(
            "add table bridge lab\n\
             add chain bridge lab forward {{ type filter hook forward priority 0; }}\n\
             add rule bridge lab forward iifname {from} oifname {to} counter drop\n"
        );
        tool(&self.namespaces, "nft", &["-f", "-"], &script).map(drop)
    }

    /// Takes all cuts back; how many frames they have dropped.
    pub(super) fn heal(&self) -> Result<u64, LabError> {
        let run = |script: &str| tool(&self.namespaces, "nft", &["-f", "-"], script);
        run("add table bridge lab\n")?;
        let said = run("list table bridge lab\n")?;
        run("delete table bridge lab\n")?;
        let count = |rule: &str| rule.split(' ').next()?.parse::<u64>().ok();
        Ok(said.split("counter packets ").skip(1).filter_map(count).sum())
    }
}

/// A switch looks at no IP header. A kernel with `br_netfilter` shows each packet of a bridge to
/// the IP firewall, too, unless told not to.
fn keep_from_firewall(namespaces: &Namespaces) -> Result<(), LabError> {
    let quiet = || -> std::io::Result<()> {
        namespaces.enter()?;
        for family in ["ip", "ip6", "arp"] {
            match fs::write(format!("/proc/sys/net/bridge/bridge-nf-call-{family}tables"), "0") {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    };
    let done = std::thread::scope(|scope| scope.spawn(quiet).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        .doing(|| "keep the switch from the firewall".to_owned())
}

/// Runs a script of ip(8) commands in `namespaces`.
pub(super) fn ip(namespaces: &Namespaces, script: &str) -> Result<(), LabError> {
    tool(namespaces, "ip", &["-batch", "-"], script).map(drop)
}

/// Makes an interface in `namespaces` whose other end is this program.
fn tap(namespaces: &Namespaces, name: &str) -> Result<Tun, LabError> {
    let make = || -> std::io::Result<Tun> {
        namespaces.enter()?;
        Tun::create_tap(name).map_err(std::io::Error::other)
    };
    let made = std::thread::scope(|scope| scope.spawn(make).join().expect("no panic in tap"));
    made.doing(|| format!("make the interface {name}"))
}

fn tool(
    namespaces: &Namespaces,
    tool: &'static str,
    args: &[&str],
    script: &str,
) -> Result<String, LabError> {
    let run = || -> std::io::Result<std::process::Output> {
        namespaces.enter()?;
        let mut child = Command::new(tool)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(script.as_bytes())?;
        }
        child.wait_with_output()
    };
    let output = std::thread::scope(|scope| scope.spawn(run).join().expect("no panic in tool"));
    let output = output.doing(|| format!("run {tool} (is it installed? see `make setup`)"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(LabError::Tool { tool, said, script: script.to_owned() })
}
