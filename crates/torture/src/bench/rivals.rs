//! The death of a host as clients of a Redis see it: Hotspare beside Redis Sentinel.
//!
//! Clients are the same for all: each appends numbers to a list of its own, at a steady rate,
//! waits for each reply for a while and connects anew without one. Where to is said by Sentinel,
//! as its clients ask it, or is the service address.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use super::peers::{ask, replica, say};
use super::{PORT, epoch_after, fill_with};
use crate::clients::{ClientError, Connection, Outcome, Reply, resp};
use crate::clock::{Instant, millis};
use crate::demo::outage;
use crate::lab::{Host, LAB_DIR, LabError, Process, SERVICE_CIDR, SERVICE_V4};
use crate::protected::{Engine, HANG, last_words, wait_for_service};
use crate::{Lab, programs};

const SENTINEL_PORT: u16 = 26379;
/// A client waits as long for a reply, then connects anew.
const REPLY_AT_MOST: Duration = Duration::from_millis(250);
const CONNECT_AT_MOST: Duration = Duration::from_millis(100);
/// Between two attempts.
const RETRY_EVERY: Duration = Duration::from_millis(5);
/// After the first good reply, for the others to come back.
const AFTERWARDS: Duration = Duration::from_millis(700);

/// Who keeps the Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// Hotspare, `--guarantee timeline`.
    Timeline,
    /// Hotspare, `--guarantee output-commit`.
    OutputCommit,
    /// Three Sentinels and a replica.
    Sentinel,
}

impl Keeper {
    /// All of them.
    pub const ALL: [Keeper; 3] = [Keeper::Timeline, Keeper::OutputCommit, Keeper::Sentinel];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Keeper::Timeline => "Hotspare timeline",
            Keeper::OutputCommit => "Hotspare output-commit",
            Keeper::Sentinel => "Redis replica and Sentinel",
        }
    }
}

/// One death.
#[derive(Clone, Debug)]
pub struct RivalBench {
    /// Who keeps the Redis.
    pub keeper: Keeper,
    /// The `hotspare` program.
    pub hotspare: PathBuf,
    /// Records that it has besides.
    pub keys: u64,
    /// Requests a second, over all clients.
    pub rate_per_s: f64,
    /// Clients.
    pub clients: usize,
    /// Between two checkpoints.
    pub epoch: Duration,
    /// `down-after-milliseconds` of Sentinel.
    pub sentinel_ms: u64,
    /// Load before the death.
    pub before: Duration,
}

/// What it did to clients.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RivalResult {
    /// The longest time without any good reply around the death.
    pub outage_ms: f64,
    /// From the death until every client had a good reply again, at the latest.
    pub all_back_ms: f64,
    /// Acknowledged before or after the death, and not there at the end.
    pub lost: usize,
    /// Acknowledged in all.
    pub acknowledged: usize,
    /// Connections that broke.
    pub broken: usize,
    /// Requests without a good reply.
    pub failed: usize,
    /// The primary had said that no spare could take over when its host died: there is nothing
    /// else here.
    pub unprotected: bool,
}

/// Kills the host of a Redis under load, in a lab of its own, when it says that it is protected.
pub fn rival(bench: &RivalBench) -> Result<RivalResult, LabError> {
    let lab = Lab::new(3)?;
    let (processes, place) = make(bench, &lab)?;
    let stop = Arc::new(AtomicBool::new(false));
    let interval = Duration::from_secs_f64(bench.clients as f64 / bench.rate_per_s);
    let client = |number: usize| {
        let (place, stop) = (place.clone(), Arc::clone(&stop));
        let phase = interval.mul_f64(number as f64 / bench.clients as f64);
        lab.client().thread(move || Client::new(number, place).run(phase, interval, &stop))
    };
    let clients: Vec<_> = (0..bench.clients).map(client).collect();
    (Instant::now() + bench.before).sleep_until();
    let is_open = |primary: &Process| Engine::last_protection(primary) == Some(false);
    let primary = processes.first().filter(|_| bench.keeper != Keeper::Sentinel);
    let deadline = Instant::now() + HANG;
    while primary.is_some_and(is_open) && Instant::now() < deadline {
        std::thread::sleep(RETRY_EVERY);
    }
    let death = lab.host(0).kill()?;
    if primary.is_some_and(is_open) || !served_again(&lab, &place) {
        stop.store(true, Ordering::Relaxed);
        // Its last words may have come meanwhile.
        return match primary.is_some_and(is_open) {
            true => Ok(RivalResult { unprotected: true, ..RivalResult::default() }),
            false => Err(nobody(&processes)),
        };
    }
    (Instant::now() + AFTERWARDS).sleep_until();
    stop.store(true, Ordering::Relaxed);
    judge(&lab, &place, clients, death)
}

/// Where clients find the Redis.
#[derive(Clone, Debug)]
enum Place {
    Service(SocketAddr),
    Sentinels(Vec<SocketAddr>),
}

impl Place {
    /// Where it is said to be; nobody may know.
    fn find(&self) -> Option<SocketAddr> {
        match self {
            Place::Service(address) => Some(*address),
            Place::Sentinels(sentinels) => sentinels.iter().find_map(|one| master(*one).ok()),
        }
    }
}

/// What a Sentinel says (`SENTINEL get-master-addr-by-name`).
fn master(sentinel: SocketAddr) -> Result<SocketAddr, ClientError> {
    let mut connection = Connection::open(sentinel, CONNECT_AT_MOST, CONNECT_AT_MOST)?;
    connection.send(resp(&["SENTINEL", "get-master-addr-by-name", "hot"]).as_bytes())?;
    let mut lines = Vec::new();
    for _ in 0..5 {
        lines.push(String::from_utf8_lossy(connection.line()?).into_owned());
    }
    let address = format!("{}:{}", lines[2], lines[4]);
    address.parse().map_err(|_| ClientError::Wrong(address))
}

fn make(bench: &RivalBench, lab: &Lab) -> Result<(Vec<Process>, Place), LabError> {
    let mut redis = super::redis();
    let service: SocketAddr = (SERVICE_V4, PORT).into();
    if bench.keeper != Keeper::Sentinel {
        let more: &[&str] = match bench.keeper {
            Keeper::OutputCommit => &["--guarantee", "output-commit"],
            _ => &[],
        };
        let engine = Engine {
            binary: bench.hotspare.clone(),
            epoch: bench.epoch,
            service_cidr: Some(SERVICE_CIDR.to_owned()),
            replicated: vec![],
            more: more.iter().map(|word| (*word).to_owned()).collect(),
        };
        let spare = engine.spare(lab.host(1))?;
        let primary = engine.run(lab.host(0), &[lab.host(1)], &redis)?;
        wait_for_service(lab.client(), service, HANG)?;
        fill_with(lab, bench.keys, 100)?;
        epoch_after(&primary, Instant::now())?;
        return Ok((vec![primary, spare], Place::Service(service)));
    }
    redis.extend(["--repl-diskless-sync-delay", "0"].map(str::to_owned));
    let mut processes = vec![programs::start(lab.host(0), &redis)?];
    wait_for_service(lab.client(), lab.host(0).socket(PORT), HANG)?;
    // Replicas do not hear of DEBUG: the first copy must have it all.
    let (inside, count) = (Arc::clone(lab.host(0)), bench.keys.to_string());
    lab.host(0).inside(move || ask(&inside, &["DEBUG", "POPULATE", &count, "key", "100"]))?;
    processes.push(replica(&redis, lab.host(1), lab.host(0))?);
    for host in lab.hosts() {
        processes.push(sentinel(host, lab.host(0), bench.sentinel_ms)?);
    }
    for host in lab.hosts() {
        agreed(host)?;
    }
    let sentinels = lab.hosts().iter().map(|host| host.socket(SENTINEL_PORT)).collect();
    Ok((processes, Place::Sentinels(sentinels)))
}

fn sentinel(host: &Host, primary: &Host, silence_ms: u64) -> Result<Process, LabError> {
    let text = format!(
        "port {SENTINEL_PORT}\nprotected-mode no\nsentinel monitor hot {} {PORT} 2\n\
         sentinel down-after-milliseconds hot {silence_ms}\nsentinel failover-timeout hot 1000\n\
         sentinel parallel-syncs hot 1\n",
        primary.v4()
    );
    programs::put(host, "sentinel.conf", text.as_bytes())?;
    let path = format!("{LAB_DIR}/sentinel.conf");
    programs::start(host, &["redis-server".to_owned(), path, "--sentinel".to_owned()])
}

/// Waits until the Sentinel of a host knows the replica and the two others.
fn agreed(host: &Arc<Host>) -> Result<(), LabError> {
    let deadline = Instant::now() + HANG;
    let sentinel = host.socket(SENTINEL_PORT);
    while Instant::now() < deadline {
        let said = host.inside(move || say(sentinel, &["INFO", "sentinel"])).unwrap_or_default();
        if said.contains("status=ok") && said.contains("slaves=1,sentinels=3") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(LabError::Deadline { what: "Sentinels that know each other".into(), waited: HANG })
}

/// Whether somebody else answers at the place, in time.
fn served_again(lab: &Lab, place: &Place) -> bool {
    let place = place.clone();
    let answers = move || {
        let deadline = Instant::now() + HANG;
        while Instant::now() < deadline {
            if place.find().is_some_and(|server| is_master(server).unwrap_or(false)) {
                return true;
            }
            std::thread::sleep(RETRY_EVERY);
        }
        false
    };
    lab.client().inside(answers)
}

/// That nobody serves after the death, with what everybody said last.
fn nobody(processes: &[Process]) -> LabError {
    let said: Vec<String> = processes.iter().map(last_words).collect();
    LabError::Deadline {
        what: format!("a Redis after the death; {}", said.join("\n")),
        waited: HANG,
    }
}

fn is_master(server: SocketAddr) -> Result<bool, ClientError> {
    let mut connection = Connection::open(server, CONNECT_AT_MOST, REPLY_AT_MOST)?;
    greet(&mut connection)
}

/// Whether it takes writes: clients of Sentinel are to ask, because it may be late.
fn greet(connection: &mut Connection) -> Result<bool, ClientError> {
    connection.send(resp(&["INFO", "replication"]).as_bytes())?;
    let head = String::from_utf8_lossy(connection.line()?).into_owned();
    let count: Option<usize> = head.strip_prefix('$').and_then(|count| count.parse().ok());
    let text = connection.bytes(count.ok_or(ClientError::Wrong(head))? + 2)?;
    Ok(String::from_utf8_lossy(text).contains("role:master"))
}

/// One client and what it has seen.
struct Client {
    number: usize,
    place: Place,
    connection: Option<Connection>,
    replies: Vec<Reply>,
    acknowledged: Vec<u64>,
    broken: usize,
    /// Where the connection was that broke last, and until when it is not tried again.
    avoided: Option<(SocketAddr, Instant)>,
    server: Option<SocketAddr>,
}

impl Client {
    fn new(number: usize, place: Place) -> Client {
        Client {
            number,
            place,
            connection: None,
            replies: vec![],
            acknowledged: vec![],
            broken: 0,
            avoided: None,
            server: None,
        }
    }

    fn run(mut self, phase: Duration, interval: Duration, stop: &AtomicBool) -> Client {
        let mut due = Instant::now() + phase;
        let mut value = 0;
        while !stop.load(Ordering::Relaxed) {
            due.sleep_until();
            while self.connection.is_none() && !stop.load(Ordering::Relaxed) {
                if self.connect().is_none() {
                    std::thread::sleep(RETRY_EVERY);
                }
            }
            value += 1;
            self.append(value, due);
            due = due + interval;
        }
        self
    }

    fn connect(&mut self) -> Option<()> {
        let server = self.place.find()?;
        // Sentinel names the dead one until it has another: that is not worth a wait each time.
        let is_avoided = |(dead, until): (SocketAddr, Instant)| {
            matches!(self.place, Place::Sentinels(_)) && dead == server && Instant::now() < until
        };
        if self.avoided.is_some_and(is_avoided) {
            return None;
        }
        let opened = Connection::open(server, CONNECT_AT_MOST, REPLY_AT_MOST);
        let mut connection = opened.ok()?;
        greet(&mut connection).ok()?.then_some(())?;
        self.connection = Some(connection);
        self.server = Some(server);
        Some(())
    }

    fn append(&mut self, value: u64, due: Instant) {
        let Some(connection) = &mut self.connection else { return };
        let sent = Instant::now();
        let request = resp(&["RPUSH", &format!("client:{}", self.number), &value.to_string()]);
        let result = connection.send(request.as_bytes()).and_then(|()| {
            let line = connection.line()?;
            let is_count = line.first() == Some(&b':');
            is_count
                .then_some(())
                .ok_or_else(|| ClientError::Wrong(String::from_utf8_lossy(line).into_owned()))
        });
        let outcome = match &result {
            Ok(()) => Outcome::Good,
            Err(ClientError::Timeout) => Outcome::Timeout,
            Err(ClientError::Wrong(_)) => Outcome::Wrong,
            Err(_) => Outcome::Lost,
        };
        self.replies.push(Reply { due, sent, done: Instant::now(), outcome });
        if outcome == Outcome::Good {
            self.acknowledged.push(value);
        } else {
            self.connection = None;
            self.broken += 1;
            let until = Instant::now() + Duration::from_millis(500);
            self.avoided = self.server.map(|server| (server, until));
        }
    }
}

fn judge(
    lab: &Lab,
    place: &Place,
    clients: Vec<JoinHandle<Client>>,
    death: Instant,
) -> Result<RivalResult, LabError> {
    let join = |client: JoinHandle<Client>| {
        client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    };
    let clients: Vec<Client> = clients.into_iter().map(join).collect();
    let mut result = RivalResult::default();
    for client in &clients {
        let name = format!("client:{}", client.number);
        let place = place.clone();
        let kept = lab.client().inside(move || {
            let server = place.find().ok_or(ClientError::Timeout)?;
            numbers_of(server, &name)
        });
        let kept = kept.map_err(|error| LabError::Io {
            doing: "read what is kept".into(),
            source: std::io::Error::other(error),
        })?;
        result.lost += client.acknowledged.iter().filter(|one| !kept.contains(one)).count();
        result.acknowledged += client.acknowledged.len();
        result.broken += client.broken;
        let good = |reply: &&Reply| reply.outcome == Outcome::Good;
        result.failed += client.replies.iter().filter(|reply| !good(reply)).count();
        let back = client.replies.iter().filter(good).find(|reply| reply.sent > death);
        let back_ms = back.map_or(f64::INFINITY, |reply| millis(reply.done.since(death)));
        result.all_back_ms = result.all_back_ms.max(back_ms);
    }
    let mut replies: Vec<Reply> = clients.into_iter().flat_map(|client| client.replies).collect();
    replies.sort_by_key(|reply| reply.done);
    let what = "a reply after the death".to_owned();
    let (last, first) = outage(&replies, death).ok_or(LabError::Deadline { what, waited: HANG })?;
    result.outage_ms = millis(first.since(last));
    if result.all_back_ms.is_infinite() {
        let what = "a reply to every client after the death".to_owned();
        return Err(LabError::Deadline { what, waited: AFTERWARDS });
    }
    Ok(result)
}

/// A list of numbers.
fn numbers_of(
    server: SocketAddr,
    name: &str,
) -> Result<std::collections::BTreeSet<u64>, ClientError> {
    let mut connection = Connection::open(server, HANG, HANG)?;
    connection.send(resp(&["LRANGE", name, "0", "-1"]).as_bytes())?;
    let head = String::from_utf8_lossy(connection.line()?).into_owned();
    let count = head.strip_prefix('*').and_then(|count| count.parse().ok());
    let count: usize = count.ok_or(ClientError::Wrong(head))?;
    let mut numbers = std::collections::BTreeSet::new();
    for _ in 0..count {
        connection.line()?;
        let said = String::from_utf8_lossy(connection.line()?).into_owned();
        numbers.insert(said.parse().map_err(|_| ClientError::Wrong(said))?);
    }
    Ok(numbers)
}
