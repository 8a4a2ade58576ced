//! Clients of a Redis that share keys and write down what they did, when, and what came of it. A
//! checker tells whether there is an order in which all of it makes sense (linearizability).
//!
//! Keys are in *chapters*: after some hundred operations all go on to new keys, so that a chapter
//! which everybody has left can be checked, and forgotten.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use crate::Host;
use crate::clients::{ClientError, Connection};
use crate::clock::Instant;
use crate::dice::Dice;
use crate::fleet::Pace;
use crate::lab::lock;

/// Those who share keys.
const COUNT: usize = 6;
/// Operations in a chapter.
const CHAPTER: u64 = 240;
/// Keys of each kind in a chapter.
const REGISTERS: u64 = 3;
const LISTS: u64 = 2;
/// Nobody is in a chapter.
const NOWHERE: u64 = u64::MAX;

/// One operation.
#[derive(Clone, Debug, Serialize)]
struct Operation {
    client: usize,
    key: String,
    op: &'static str,
    /// What was written.
    value: String,
    /// When it was asked, and when the reply was there; ns.
    call: u64,
    /// Nothing if there was no reply: it may be done at any time later.
    #[serde(rename = "return")]
    done: Option<u64>,
    /// The reply.
    result: String,
    #[serde(skip)]
    chapter: u64,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    /// Nanoseconds between two operations of one of them, on average.
    pause_ns: AtomicU64,
    chapter: AtomicU64,
    operations: AtomicU64,
    /// The chapter that each is in while it waits for a reply.
    places: [AtomicU64; COUNT],
    written: Mutex<Written>,
}

#[derive(Debug, Default)]
struct Written {
    operations: Vec<Operation>,
    /// Keys of chapters that are checked: the server may forget them.
    checked: Vec<String>,
    resets: Vec<String>,
    wrongs: Vec<String>,
}

/// What witnesses say about a round.
#[derive(Debug, Default)]
pub struct Testimony {
    /// Operations that were checked.
    pub operations: u64,
    /// Connections that broke.
    pub resets: Vec<String>,
    /// No order of them makes sense.
    pub is_senseless: bool,
    /// Anything else that is wrong.
    pub wrongs: Vec<String>,
}

/// Clients that share keys.
pub struct Witnesses {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    checker: PathBuf,
    patience: Duration,
}

impl Witnesses {
    /// Starts them, inside `client`.
    pub fn start(
        client: &Host,
        server: SocketAddr,
        checker: PathBuf,
        patience: Duration,
        seed: u64,
    ) -> Witnesses {
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            pause_ns: AtomicU64::new(0),
            chapter: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            places: std::array::from_fn(|_| AtomicU64::new(NOWHERE)),
            written: Mutex::default(),
        });
        let start = |number: usize| {
            let shared = Arc::clone(&shared);
            let dice = Dice::new(seed).part(number as u64);
            client.thread(move || Witness { number, server, patience, dice, shared }.run())
        };
        let threads = (0..COUNT).map(start).collect();
        let witnesses = Witnesses { shared, threads, checker, patience };
        witnesses.set_pace(Pace::PerSecond(0));
        witnesses
    }

    /// They ask as hard as other clients do; when those are idle, now and then.
    pub fn set_pace(&self, pace: Pace) {
        let pause = match pace {
            Pace::PerSecond(0..=20) => Duration::from_millis(60),
            Pace::PerSecond(..=200) => Duration::from_millis(20),
            Pace::PerSecond(..=1000) => Duration::from_millis(6),
            Pace::PerSecond(_) => Duration::from_millis(2),
            Pace::Saturated => Duration::ZERO,
        };
        self.shared.pause_ns.store(pause.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Has all chapters checked that are over. The file stays if something is wrong.
    pub fn testify(&mut self, file: &Path) -> Testimony {
        // Whoever asks later is in a chapter of now or later.
        let now = self.shared.chapter.fetch_add(1, Ordering::SeqCst) + 1;
        let oldest = self.all_have_left(now);
        let over = {
            let mut written = lock(&self.shared.written);
            let (over, later) =
                written.operations.drain(..).partition(|one: &Operation| one.chapter < oldest);
            written.operations = later;
            let resets = std::mem::take(&mut written.resets);
            let wrongs = std::mem::take(&mut written.wrongs);
            let mut checked: Vec<String> = over.iter().map(|one| one.key.clone()).collect();
            checked.sort_unstable();
            checked.dedup();
            written.checked.extend(checked);
            Written { operations: over, resets, wrongs, checked: Vec::new() }
        };
        let operations = over.operations.len() as u64;
        let (resets, mut wrongs) = (over.resets, over.wrongs);
        let checked = self.check(&over.operations, file);
        let is_senseless = matches!(checked, Ok(false));
        if is_senseless {
            wrongs.push(format!("NOT LINEARIZABLE: see {}", file.display()));
        }
        if let Err(error) = checked {
            wrongs.push(format!("the history cannot be checked: {error}"));
        }
        Testimony { operations, resets, is_senseless, wrongs }
    }

    /// Waits until nobody is in a chapter before this one; the oldest that somebody is in, if that
    /// takes too long.
    fn all_have_left(&self, chapter: u64) -> u64 {
        let deadline = Instant::now() + self.patience + Duration::from_secs(1);
        loop {
            let places = self.shared.places.iter().map(|place| place.load(Ordering::SeqCst));
            let oldest = places.min().unwrap_or(NOWHERE);
            if oldest >= chapter || Instant::now() > deadline {
                return oldest.min(chapter);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn check(&self, operations: &[Operation], file: &Path) -> std::io::Result<bool> {
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir)?;
        }
        let mut out = BufWriter::new(File::create(file)?);
        for operation in operations {
            serde_json::to_writer(&mut out, operation)?;
            out.write_all(b"\n")?;
        }
        out.flush()?;
        let output = Command::new(&self.checker).arg(file).output()?;
        match output.status.code() {
            Some(0) => fs::remove_file(file).map(|()| true),
            Some(1) => Ok(false),
            _ => Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
        }
    }
}

impl Drop for Witnesses {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Its operations are not asked for any more.
            let _ = thread.join();
        }
    }
}

struct Witness {
    number: usize,
    server: SocketAddr,
    patience: Duration,
    dice: Dice,
    shared: Arc<Shared>,
}

impl Witness {
    fn run(mut self) {
        let mut connection = None;
        let mut count = 0;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let pause = Duration::from_nanos(self.shared.pause_ns.load(Ordering::Relaxed) * 2);
            std::thread::sleep(self.dice.between(Duration::ZERO, pause));
            let mut open = match connection.take() {
                Some(open) => open,
                None => match Connection::open(self.server, self.patience, self.patience) {
                    Ok(open) => open,
                    Err(error) => {
                        self.broke(&error);
                        continue;
                    }
                },
            };
            count += 1;
            let asked = self.forget(&mut open).and_then(|()| self.operate(&mut open, count));
            match asked {
                Ok(()) => connection = Some(open),
                Err(error) => self.broke(&error),
            }
        }
    }

    fn broke(&self, error: &ClientError) {
        let words = format!("client {} of shared keys: {error}", self.number);
        let mut written = lock(&self.shared.written);
        match error {
            ClientError::Connect(_) | ClientError::Lost(_) => written.resets.push(words),
            ClientError::Timeout | ClientError::Wrong(_) | ClientError::Unfinished => {
                written.wrongs.push(words);
            }
        }
        drop(written);
        std::thread::sleep(Duration::from_millis(10));
    }

    fn operate(&mut self, connection: &mut Connection, count: u64) -> Result<(), ClientError> {
        let chapter = self.enter();
        let value = format!("{}.{count}", self.number);
        let (op, key) = self.draw();
        let key = format!("shared:{chapter}:{key}");
        let words: Vec<&str> = match op {
            "get" => vec!["GET", &key],
            "set" => vec!["SET", &key, &value],
            "swap" => vec!["GETSET", &key, &value],
            "push" => vec!["RPUSH", &key, &value],
            "pop" => vec!["LPOP", &key],
            _ => vec!["LRANGE", &key, "0", "-1"],
        };
        let request = crate::clients::resp(&words);
        let call = Instant::now();
        let answer = connection.send(request.as_bytes()).and_then(|()| take(connection));
        let done = answer.is_ok().then(|| Instant::now().0);
        let writes = matches!(op, "set" | "swap" | "push");
        let value = if writes { value } else { String::new() };
        let (client, call) = (self.number, call.0);
        let result = answer.as_ref().cloned().unwrap_or_default();
        let operation = Operation { client, key, op, value, call, done, result, chapter };
        lock(&self.shared.written).operations.push(operation);
        self.leave();
        answer.map(|_| ())
    }

    /// Has the server forget what is checked, or it would grow for hours.
    fn forget(&self, connection: &mut Connection) -> Result<(), ClientError> {
        let keys = std::mem::take(&mut lock(&self.shared.written).checked);
        if keys.is_empty() {
            return Ok(());
        }
        let mut words = vec!["DEL"];
        words.extend(keys.iter().map(String::as_str));
        connection.send(crate::clients::resp(&words).as_bytes())?;
        take(connection).map(|_| ())
    }

    fn draw(&mut self) -> (&'static str, String) {
        if self.dice.chance(0.6) {
            let op = ["get", "get", "set", "set", "swap"][self.dice.below(5) as usize];
            return (op, format!("register{}", self.dice.below(REGISTERS)));
        }
        let op = ["push", "push", "pop", "range"][self.dice.below(4) as usize];
        (op, format!("list{}", self.dice.below(LISTS)))
    }

    /// The chapter of the next operation: the place is taken before the chapter is read again, so
    /// nobody takes it for over.
    fn enter(&self) -> u64 {
        let (chapter, place) = (&self.shared.chapter, &self.shared.places[self.number]);
        if self.shared.operations.fetch_add(1, Ordering::SeqCst) % CHAPTER == CHAPTER - 1 {
            chapter.fetch_add(1, Ordering::SeqCst);
        }
        loop {
            let now = chapter.load(Ordering::SeqCst);
            place.store(now, Ordering::SeqCst);
            if chapter.load(Ordering::SeqCst) == now {
                return now;
            }
        }
    }

    fn leave(&self) {
        self.shared.places[self.number].store(NOWHERE, Ordering::SeqCst);
    }
}

/// A reply of any kind as text; nothing there is `nil`, items are joined by commas.
fn take(connection: &mut Connection) -> Result<String, ClientError> {
    let line = String::from_utf8_lossy(connection.line()?).into_owned();
    let (kind, rest) = line.split_at_checked(1).unwrap_or_default();
    match (kind, rest.parse::<i64>()) {
        ("+", _) => Ok(rest.to_owned()),
        (":", Ok(number)) => Ok(number.to_string()),
        ("$", Ok(-1)) => Ok("nil".to_owned()),
        ("$", Ok(count)) => {
            let text = connection.bytes(usize::try_from(count).unwrap_or(0))?;
            let text = String::from_utf8_lossy(text).into_owned();
            connection.line()?;
            Ok(text)
        }
        ("*", Ok(count)) => {
            let items = (0..count).map(|_| take(connection)).collect::<Result<Vec<_>, _>>()?;
            Ok(items.join(","))
        }
        _ => Err(ClientError::Wrong(line)),
    }
}
