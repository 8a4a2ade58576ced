//! The switch between simulated hosts: a bridge in a network namespace of its own. Partitions
//! are drops of frames between two of its ports, so they hit ARP and any address alike.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use hotspare_kernel::Namespaces;

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
             add rule bridge lab forward iifname {from} oifname {to} drop\n"
        );
        tool(&self.namespaces, "nft", &["-f", "-"], &script)
    }

    pub(super) fn heal(&self) -> Result<(), LabError> {
        let script = "add table bridge lab\ndelete table bridge lab\n";
        tool(&self.namespaces, "nft", &["-f", "-"], script)
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
    tool(namespaces, "ip", &["-batch", "-"], script)
}

fn tool(
    namespaces: &Namespaces,
    tool: &'static str,
    args: &[&str],
    script: &str,
) -> Result<(), LabError> {
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
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(LabError::Tool { tool, said, script: script.to_owned() })
}
