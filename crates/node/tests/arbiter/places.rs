//! The real arbiters, on simulated hosts of their own.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use hotspare_torture::lab::{Host, LAB_DIR, Process};
use hotspare_torture::protected::{HANG, wait_for_listener};
use nix::sys::signal::Signal;

const ETCD_PORT: u16 = 2379;
const S3_PORT: u16 = 5000;

/// An etcd of one member.
pub struct Etcd<'a> {
    host: &'a Host,
    process: Process,
    tls: bool,
}

impl<'a> Etcd<'a> {
    /// Starts one; returns when it listens.
    pub fn start(host: &'a Host) -> Self {
        Self::start_with(host, false)
    }

    /// With `tls`, its certificate and authority are in the host's directory.
    pub fn start_with(host: &'a Host, tls: bool) -> Self {
        let process = Self::spawn(host, tls);
        Self { host, process, tls }
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
        self.process = Self::spawn(self.host, self.tls);
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

/// A store that speaks S3.
pub struct S3<'a> {
    host: &'a Host,
    _process: Process,
}

impl<'a> S3<'a> {
    /// Starts one with the bucket `terms`.
    pub fn start(host: &'a Host) -> Self {
        let mut command = Command::new(moto());
        let port = S3_PORT.to_string();
        command.args(["-H", &host.v4().to_string(), "-p", &port]);
        let process = host.spawn(&mut command).expect("start moto (see scripts/setup)");
        wait_for_listener(&process, S3_PORT, HANG).expect("moto listens");
        let store = Self { host, _process: process };
        store.put("/terms");
        store
    }

    fn socket(&self) -> SocketAddr {
        self.host.socket(S3_PORT)
    }

    /// A put without a body: makes a bucket.
    fn put(&self, path: &str) {
        use std::io::{Read, Write};
        let (at, path) = (self.socket(), path.to_owned());
        let answer = self.host.inside(move || {
            let mut stream = std::net::TcpStream::connect(at).expect("connect to moto");
            let head = format!("PUT {path} HTTP/1.0\r\nHost: {at}\r\nContent-Length: 0\r\n\r\n");
            stream.write_all(head.as_bytes()).expect("ask moto");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("moto answers");
            answer
        });
        assert!(answer.contains(" 200 "), "{answer}");
    }

    /// For `--arbiter`.
    pub fn place(&self, bucket: &str) -> String {
        format!("s3://{bucket}/hs?endpoint=http://{}&region=us-east-1", self.socket())
    }
}

/// Where `scripts/setup` puts it, if it is not installed.
fn moto() -> PathBuf {
    let own = PathBuf::from("/var/lib/hotspare-setup/moto/bin/moto_server");
    if own.exists() { own } else { "moto_server".into() }
}

/// Keys for the server on the first of these hosts and for a client, on all of them.
pub fn make_keys(hosts: &[&Host]) {
    let first = hosts[0];
    let script = format!(
        "set -e; cd {LAB_DIR}
        key() {{ openssl ecparam -name prime256v1 -genkey -noout -out $1.key; }}
        key ca; openssl req -x509 -new -key ca.key -subj /CN=authority -days 2 -out ca.crt
        printf 'subjectAltName=IP:{}\\nextendedKeyUsage=serverAuth,clientAuth\\n' >more
        for name in server client; do
            key $name; openssl req -new -key $name.key -subj /CN=$name -out $name.csr
            openssl x509 -req -in $name.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \\
                -extfile more -out $name.crt
        done",
        first.v4()
    );
    first.run(Command::new("/bin/sh").args(["-c", &script]), HANG).unwrap();
    for host in &hosts[1..] {
        for name in ["ca.crt", "server.crt", "server.key", "client.crt", "client.key"] {
            let name = format!("{LAB_DIR}/{name}");
            fs::copy(first.outside(&name), host.outside(&name)).unwrap();
        }
    }
}
