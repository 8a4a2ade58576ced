//! Stands between an agent and S3: sees each request, and decides what becomes of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use hotspare_torture::lab::Host;

/// What goes by.
pub struct Request {
    /// Method and target.
    pub line: String,
    pub bytes: Vec<u8>,
}

/// Where an agent is: what it does next has been asked for, or what it did has not been answered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Asked,
    Done,
}

/// What becomes of a request.
pub enum Act {
    /// It goes on.
    Pass,
    /// Nothing is answered before who asked is dead.
    Hold,
}

type Rule = dyn Fn(&Request, Side) -> Act + Send + Sync;

/// Serves on the host until this program ends; on which port.
pub fn start(
    host: &Arc<Host>,
    s3: SocketAddr,
    rule: impl Fn(&Request, Side) -> Act + Send + Sync + 'static,
) -> u16 {
    let listener = host.inside(|| TcpListener::bind(("127.0.0.1", 0))).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (host, rule): (_, Arc<Rule>) = (host.clone(), Arc::new(rule));
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (host, rule) = (host.clone(), rule.clone());
            // Who is killed has nobody to tell.
            std::thread::spawn(move || drop(serve(&host, s3, client, &*rule)));
        }
    });
    port
}

/// One request; the connection ends with it.
fn serve(host: &Host, s3: SocketAddr, mut client: TcpStream, rule: &Rule) -> std::io::Result<()> {
    let request = read(&mut client)?;
    let mut answer = Vec::new();
    for side in [Side::Asked, Side::Done] {
        match rule(&request, side) {
            Act::Pass => {}
            // Its sockets end when it does.
            Act::Hold => return client.read_to_end(&mut Vec::new()).map(drop),
        }
        if side == Side::Asked {
            let mut s3 = host.inside(move || TcpStream::connect(s3))?;
            s3.write_all(&request.bytes)?;
            s3.read_to_end(&mut answer)?;
        }
    }
    client.write_all(&answer)
}

/// Reads a request, and asks for the connection to end after the answer.
fn read(client: &mut TcpStream) -> std::io::Result<Request> {
    let mut reader = BufReader::new(client);
    let (mut line, mut bytes, mut body) = (String::new(), Vec::new(), 0);
    reader.read_line(&mut line)?;
    bytes.extend(line.as_bytes());
    bytes.extend(b"Connection: close\r\n");
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let lower = header.to_ascii_lowercase();
        if let Some(length) = lower.strip_prefix("content-length:") {
            body = length.trim().parse().map_err(std::io::Error::other)?;
        }
        if !lower.starts_with("connection:") {
            bytes.extend(header.as_bytes());
        }
        if header.trim_end().is_empty() {
            break;
        }
    }
    let from = bytes.len();
    bytes.resize(from + body, 0);
    reader.read_exact(&mut bytes[from..])?;
    Ok(Request { line: line.trim_end().replace("%2F", "/"), bytes })
}
