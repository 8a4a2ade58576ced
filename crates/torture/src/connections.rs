//! What becomes of TCP connections at a failover, seen from the client.
//!
//! The server counts the requests of each connection and says the count with each reply, so a
//! connection that goes on from an older state than its client has seen gives itself away. Four
//! kinds of clients: one that has been idle since before the last checkpoint, which must be served
//! on; one that has seen replies the spare may not know; one that has only sent since then; one
//! that came too late for a checkpoint and waits without a word. The last three are either served
//! on with the right count or reset. None may hang.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::Lab;
use crate::clock::Instant;
use crate::dice::Dice;
use crate::lab::{LabError, SERVICE_V4, SERVICE_V6};
use crate::protected::{Engine, Event, HANG, event, wait_for_service};

const PORT: u16 = 7007;
/// Clients of each kind.
const CLIENTS: usize = 4;
/// Long, so that nearly every kill finds replies that no checkpoint covers.
const EPOCH: Duration = Duration::from_millis(250);

/// How long before the kill the late ones are there: enough for the primary to tell of them.
const LATE: Duration = Duration::from_millis(60);
/// How long they wait without a word before they ask whether they are served after all.
const SILENT: Duration = Duration::from_secs(8);

/// A line that starts with `q` is counted and not answered.
const SERVER: &str = r#"
import socket, sys, threading
family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family, backlog=64)
def serve(connection):
    count = 0
    with connection, connection.makefile('rb') as lines:
        for line in lines:
            count += 1
            if not line.startswith(b'q'):
                connection.sendall(b'%d %s' % (count, line))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"#;

/// What became of the connections of one failover.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Idle connections that were served on.
    pub idle_alive: usize,
    /// Busy ones that were served on with the right count.
    pub busy_alive: usize,
    /// How long after the spare had taken over each reset was seen.
    pub resets: Vec<Duration>,
    /// Late ones that were reset, though they said nothing.
    pub late_resets: usize,
    /// Broken promises.
    pub wrongs: Vec<String>,
}

/// What one client has seen.
enum Seen {
    Alive,
    Reset(Instant),
    Wrong(String),
}

struct Client {
    lines: BufReader<TcpStream>,
    count: u64,
}

impl Client {
    fn open(service: SocketAddr) -> std::io::Result<Client> {
        let stream = TcpStream::connect_timeout(&service, HANG)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANG))?;
        stream.set_write_timeout(Some(HANG))?;
        Ok(Client { lines: BufReader::new(stream), count: 0 })
    }

    fn tell(&mut self) -> std::io::Result<()> {
        self.count += 1;
        self.lines.get_mut().write_all(format!("q{}\n", self.count).as_bytes())
    }

    /// Waits for a word that does not come, then asks; `None` if it is served.
    fn wait(&mut self) -> Option<Seen> {
        let limit = |stream: &TcpStream, limit| stream.set_read_timeout(Some(limit));
        let waited = limit(self.lines.get_ref(), SILENT);
        let mut reply = String::new();
        let waited = waited.and_then(|()| self.lines.read_line(&mut reply));
        match waited {
            Ok(_) => return Some(Seen::Wrong(format!("{reply:?} in reply to nothing"))),
            Err(error) if error.kind() != ErrorKind::WouldBlock => return Some(judge(&error)),
            Err(_) => {}
        }
        if let Err(error) = limit(self.lines.get_ref(), HANG) {
            return Some(judge(&error));
        }
        self.ask().map(|seen| match seen {
            Seen::Reset(_) => Seen::Wrong("it was not told that its connection is gone".into()),
            seen => seen,
        })
    }

    /// Asks and checks the reply; `None` if that is right.
    fn ask(&mut self) -> Option<Seen> {
        self.count += 1;
        let request = format!("ask {}\n", self.count);
        let mut reply = String::new();
        let asked = self.lines.get_mut().write_all(request.as_bytes());
        match asked.and_then(|()| self.lines.read_line(&mut reply)) {
            Ok(0) => Some(Seen::Wrong("the connection ended without a reset".into())),
            Ok(_) if reply == format!("{} {request}", self.count) => None,
            Ok(_) => Some(Seen::Wrong(format!("{reply:?} in reply to request {}", self.count))),
            Err(error) => Some(judge(&error)),
        }
    }
}

fn judge(error: &std::io::Error) -> Seen {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Seen::Reset(Instant::now()),
        _ => Seen::Wrong(format!("neither served on nor reset: {error}")),
    }
}

type Clients = Vec<JoinHandle<Seen>>;

/// Clients that do `work` until `stop`, then ask once more.
fn start(
    lab: &Lab,
    service: SocketAddr,
    stop: &Arc<AtomicBool>,
    work: fn(&mut Client) -> Option<Seen>,
) -> Clients {
    let client = |_| {
        let stop = stop.clone();
        lab.client().thread(move || {
            let mut client = match Client::open(service) {
                Ok(client) => client,
                Err(error) => return Seen::Wrong(format!("cannot connect: {error}")),
            };
            if let Some(seen) = client.ask() {
                return seen;
            }
            while !stop.load(Ordering::Relaxed) {
                if let Some(seen) = work(&mut client) {
                    return seen;
                }
            }
            client.ask().unwrap_or(Seen::Alive)
        })
    };
    (0..CLIENTS).map(client).collect()
}

/// Clients that come, say something and wait for an answer that does not come.
fn start_late(lab: &Lab, service: SocketAddr) -> Clients {
    let (there, come) = std::sync::mpsc::channel();
    let client = |_| {
        let there = there.clone();
        lab.client().thread(move || {
            let mut client = match Client::open(service) {
                Ok(client) => client,
                Err(error) => return Seen::Wrong(format!("cannot connect: {error}")),
            };
            let told = client.tell();
            drop(there);
            match told {
                Ok(()) => client.wait().unwrap_or(Seen::Alive),
                Err(error) => judge(&error),
            }
        })
    };
    let clients = (0..CLIENTS).map(client).collect();
    drop(there);
    // Nobody sends: it ends when all are there.
    let () = come.recv().unwrap_or_default();
    clients
}

fn rest(_: &mut Client) -> Option<Seen> {
    std::thread::sleep(Duration::from_millis(5));
    None
}

fn tell(client: &mut Client) -> Option<Seen> {
    std::thread::sleep(Duration::from_millis(2));
    client.tell().err().map(|error| judge(&error))
}

/// One failover with clients of all kinds, over IPv4 or IPv6.
pub fn round(seed: u64, binary: PathBuf, ipv6: bool) -> Result<Outcome, LabError> {
    let lab = Lab::new(2)?;
    let (service, cidr): (SocketAddr, String) = match ipv6 {
        true => ((SERVICE_V6, PORT).into(), format!("{SERVICE_V6}/64")),
        false => ((SERVICE_V4, PORT).into(), format!("{SERVICE_V4}/24")),
    };
    let engine = Engine {
        binary,
        epoch: EPOCH,
        service_cidr: Some(cidr),
        replicated: Vec::new(),
        more: Vec::new(),
    };
    let spare = engine.spare(lab.host(1))?;
    let words = ["python3", "-c", SERVER, &service.ip().to_string(), &PORT.to_string()];
    let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
    let primary = engine.run(lab.host(0), &[lab.host(1)], &words)?;
    let first = Engine::protected(&primary)?;
    wait_for_service(lab.client(), service, HANG)?;
    let stop = Arc::new(AtomicBool::new(false));
    let idle = start(&lab, service, &stop, rest);
    let settled = primary.stdout().lines().iter().filter_map(event).filter_map(epoch_of).max();
    let settled = settled.unwrap_or(first);
    // Two more: the second begins after the idle ones have been served.
    let covered = primary
        .stdout()
        .find(HANG, |line| event(line).and_then(epoch_of).filter(|epoch| *epoch > settled + 2));
    let busy = start(&lab, service, &stop, Client::ask);
    let senders = start(&lab, service, &stop, tell);
    let wait = Dice::new(seed).between(Duration::from_millis(50), EPOCH * 3);
    (Instant::now() + wait).sleep_until();
    let late = start_late(&lab, service);
    (Instant::now() + LATE).sleep_until();
    lab.host(0).kill()?;
    let (_, taken_over) = Engine::taken_over(&spare)?;
    stop.store(true, Ordering::Relaxed);
    let mut outcome = Outcome::default();
    if covered.is_none() {
        outcome.wrongs.push("no checkpoint came after the idle clients".into());
    }
    for seen in join(idle) {
        match seen {
            Seen::Alive => outcome.idle_alive += 1,
            Seen::Reset(_) => outcome.wrongs.push("an idle connection was reset".into()),
            Seen::Wrong(wrong) => outcome.wrongs.push(format!("idle: {wrong}")),
        }
    }
    for seen in join(late) {
        match seen {
            Seen::Alive => {}
            Seen::Reset(_) => outcome.late_resets += 1,
            Seen::Wrong(wrong) => outcome.wrongs.push(format!("late: {wrong}")),
        }
    }
    for seen in join(busy).into_iter().chain(join(senders)) {
        match seen {
            Seen::Alive => outcome.busy_alive += 1,
            Seen::Reset(at) => outcome.resets.push(at.since(taken_over)),
            Seen::Wrong(wrong) => outcome.wrongs.push(format!("busy: {wrong}")),
        }
    }
    Ok(outcome)
}

fn epoch_of(event: Event) -> Option<u64> {
    match event {
        Event::Epoch { epoch, .. } => Some(epoch),
        Event::Protected { .. } | Event::Failover(_) | Event::Exit { .. } => None,
    }
}

fn join(clients: Clients) -> Vec<Seen> {
    let each = clients.into_iter().map(|client| {
        client.join().unwrap_or_else(|_| Seen::Wrong("the client's thread panicked".into()))
    });
    each.collect()
}
