//! The real arbiters, on simulated hosts of their own.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use hotspare_torture::lab::{Host, LAB_DIR, Process};
use hotspare_torture::protected::{HANG, wait_for_listener};

const S3_PORT: u16 = 5000;

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

    /// Where it listens.
    pub fn socket(&self) -> SocketAddr {
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
