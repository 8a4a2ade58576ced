//! `--metrics ADDR`: HTTP, one page, to loopback in plain text and beyond it to those who have a
//! certificate.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use hotspare_replica::{Channel, Security};

use crate::agent::Agent;
use crate::mailbox::Room;

/// Answered at once; more wait.
const CLIENTS_MAX: usize = 8;
/// A request's head is no longer.
const HEAD_BYTES_MAX: u64 = 16 << 10;

/// Answers for as long as the program lives.
pub fn serve(agent: &Agent, listener: TcpListener) -> std::io::Result<()> {
    let (agent, room) = (agent.clone(), Room::new(CLIENTS_MAX));
    let accept = move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            let (agent, place) = (agent.clone(), room.place());
            // A client that goes away in the middle is its own affair, and so is one that may not
            // ask.
            let serve = move || {
                drop(answer(&agent, stream));
                drop(place);
            };
            let _ = std::thread::Builder::new().name("metrics".into()).spawn(serve);
        }
    };
    std::thread::Builder::new().name("metrics".into()).spawn(accept).map(drop)
}

fn answer(agent: &Agent, stream: TcpStream) -> anyhow::Result<()> {
    let local = stream.peer_addr()?.ip().to_canonical().is_loopback();
    let plain = Security::Plain { insecure: false };
    // Whoever is on this host may know how its guest does.
    let security = if local { &plain } else { &agent.security };
    let mut channel = Channel::accepted(stream, security)?;
    let request = read_request(&mut channel)?;
    let (status, body) = match request.split_ascii_whitespace().collect::<Vec<_>>()[..] {
        ["GET", "/metrics", _] => ("200 OK", agent.metrics()),
        ["GET", ..] => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    write!(
        channel,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )?;
    channel.flush()?;
    Ok(())
}

/// The first line of a request, whose head is read to its end.
fn read_request(channel: &mut Channel) -> std::io::Result<String> {
    let mut lines = BufReader::new(channel.take(HEAD_BYTES_MAX));
    let mut first = String::new();
    lines.read_line(&mut first)?;
    let mut line = String::new();
    while lines.read_line(&mut line)? > 2 {
        line.clear();
    }
    Ok(first)
}
