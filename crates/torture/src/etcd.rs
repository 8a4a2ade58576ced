//! A real etcd on a simulated host, to be the arbiter. Panics where a test has to fail.

use std::process::Command;
use std::sync::Arc;

use nix::sys::signal::Signal;

use crate::Host;
use crate::lab::{LAB_DIR, Process};
use crate::protected::{HANG, wait_for_listener};

const ETCD_PORT: u16 = 2379;

/// An etcd of one member.
#[derive(Debug)]
pub struct Etcd {
    host: Arc<Host>,
    process: Process,
    tls: bool,
}

impl Etcd {
    /// Starts one; returns when it listens.
    pub fn start(host: &Arc<Host>) -> Self {
        Self::start_with(host, false)
    }

    /// With `tls`, its certificate and authority are in the host's directory.
    pub fn start_with(host: &Arc<Host>, tls: bool) -> Self {
        let process = Self::spawn(host, tls);
        Self { host: Arc::clone(host), process, tls }
    }

    fn spawn(host: &Host, tls: bool) -> Process {
        let scheme = if tls { "https" } else { "http" };
        let client = format!("{scheme}://{}", host.socket(ETCD_PORT));
        let peer = format!("http://{}", host.socket(2380));
        let mut command = Command::new("etcd");
        command.args(["--data-dir", &format!("{LAB_DIR}/etcd"), "--name", "one"]);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("one={peer}")]);
        if tls {
            let file = |name: &str| format!("{LAB_DIR}/{name}");
            command.args(["--cert-file", &file("server.crt"), "--key-file", &file("server.key")]);
            command.args(["--trusted-ca-file", &file("ca.crt"), "--client-cert-auth"]);
        }
        let process = host.spawn(&mut command).expect("start etcd (see scripts/setup)");
        wait_for_listener(&process, ETCD_PORT, HANG).expect("etcd listens");
        process
    }

    /// For `--arbiter`.
    pub fn place(&self) -> String {
        format!("etcd://{}/hs", self.host.socket(ETCD_PORT))
    }

    /// The etcd dies.
    pub fn kill(&self) {
        self.process.signal(Signal::SIGKILL).expect("kill etcd");
        self.process.wait(HANG).expect("etcd ends");
    }

    /// It comes back with what it had.
    pub fn start_again(&mut self) {
        self.process = Self::spawn(&self.host, self.tls);
    }

    /// What etcdctl says, or why it fails.
    pub fn ctl(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(words);
        if self.tls {
            let file = |name: &str| format!("{LAB_DIR}/{name}");
            command.args(["--cacert", &file("ca.crt")]);
            command.args(["--cert", &file("client.crt"), "--key", &file("client.key")]);
            command.args(["--endpoints", &format!("https://{}", self.host.socket(ETCD_PORT))]);
        } else {
            command.args(["--endpoints", &self.host.socket(ETCD_PORT).to_string()]);
        }
        self.host.run(&mut command, HANG).map_err(|error| error.to_string())
    }

    /// A field of the record of a guest.
    pub fn record(&self, guest: &str) -> serde_json::Value {
        let text = self.ctl(&["get", "--print-value-only", &format!("/hs/{guest}")]).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
    }
}
