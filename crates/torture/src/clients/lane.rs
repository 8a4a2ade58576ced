//! One connection of a load: requests at their due times, connecting anew when it breaks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::connection::{ClientError, Connection};
use super::{Pace, Progress};
use crate::clock::Instant;

/// Between two attempts to connect to a server that refuses at once.
const RECONNECT_EVERY: Duration = Duration::from_millis(5);
/// A server that is wrong once is often wrong a thousand times.
const WRONGS_KEPT_MAX: usize = 20;

/// What a lane says to its server.
pub trait Session: Send {
    /// Called on every new connection, before requests: looks at what the server knows.
    /// Unless there is more to look at, one request that is not counted.
    fn open(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        let mut request = Vec::new();
        self.ask(&mut request);
        connection.send(&request)?;
        self.take(connection)
    }

    /// Appends the next request.
    fn ask(&mut self, request: &mut Vec<u8>);

    /// Takes the reply to it. Where that is [`ClientError::Unfinished`], nothing has happened, and
    /// it is called again from the beginning of the reply.
    fn take(&mut self, connection: &mut Connection) -> Result<(), ClientError>;

    /// There will be no good reply.
    fn give_up(&mut self) {}

    /// After the last request, on a good connection: looks at everything once more.
    fn close(&mut self, connection: &mut Connection) -> Result<(), ClientError>;
}

impl Session for Box<dyn Session> {
    fn open(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        (**self).open(connection)
    }

    fn ask(&mut self, request: &mut Vec<u8>) {
        (**self).ask(request);
    }

    fn take(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        (**self).take(connection)
    }

    fn give_up(&mut self) {
        (**self).give_up();
    }

    fn close(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        (**self).close(connection)
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A good reply.
    Good,
    /// The connection was reset or closed.
    Lost,
    /// No reply in time.
    Timeout,
    /// A reply that breaks a promise.
    Wrong,
}

/// One request and what became of it.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    /// When it should have been sent. Latency counts from here.
    pub due: Instant,
    /// When it was sent.
    pub sent: Instant,
    /// When the reply was there, or the failure.
    pub done: Instant,
    /// What became of it.
    pub outcome: Outcome,
}

impl Reply {
    /// From due to done.
    pub fn latency(&self) -> Duration {
        self.done.since(self.due)
    }
}

/// What a lane has seen.
#[derive(Debug)]
pub struct LaneRecord<S> {
    /// The session at the end.
    pub session: S,
    /// Every request, in the order of their due times.
    pub replies: Vec<Reply>,
    /// Connections made after the first.
    pub reconnects: u64,
    /// Attempts to connect that failed.
    pub refused: u64,
    /// Broken promises, in words.
    pub wrongs: Vec<String>,
    /// True if [`Session::close`] has succeeded.
    pub closed: bool,
}

/// A connection of a load; see the module.
#[derive(Debug)]
pub struct Lane<S> {
    server: SocketAddr,
    pace: Pace,
    progress: Arc<Progress>,
    connection: Option<Connection>,
    connected: u64,
    /// Kept for its room.
    words: Vec<u8>,
    record: LaneRecord<S>,
}

impl<S: Session> Lane<S> {
    pub(super) fn new(
        server: SocketAddr,
        pace: Pace,
        session: S,
        progress: Arc<Progress>,
    ) -> Lane<S> {
        let record = LaneRecord {
            session,
            replies: Vec::new(),
            reconnects: 0,
            refused: 0,
            wrongs: Vec::new(),
            closed: false,
        };
        Lane { server, pace, progress, connection: None, connected: 0, words: Vec::new(), record }
    }

    /// Tries to get a connection and to open the session on it until `at_most` has passed.
    pub(super) fn open_within(&mut self, at_most: Duration) {
        let deadline = Instant::now() + at_most;
        while !self.connect() && Instant::now() < deadline {
            std::thread::sleep(RECONNECT_EVERY);
        }
    }

    /// Sends requests at `start`, `start + interval`, … until the load is stopped.
    pub(super) fn run(&mut self, start: Instant, interval: Duration) {
        let mut due = start;
        while !self.progress.is_stopped() {
            due.sleep_until();
            while self.connection.is_none() && !self.progress.is_stopped() {
                if !self.connect() {
                    std::thread::sleep(RECONNECT_EVERY);
                }
            }
            if self.progress.is_stopped() {
                return;
            }
            self.request(due);
            due = due + interval;
        }
    }

    /// Looks at everything a last time, if a connection can be had.
    pub(super) fn close_within(mut self, at_most: Duration) -> LaneRecord<S> {
        let deadline = Instant::now() + at_most;
        while !self.record.closed && Instant::now() < deadline {
            if self.connection.is_none() && !self.connect() {
                std::thread::sleep(RECONNECT_EVERY);
                continue;
            }
            let Some(connection) = &mut self.connection else { continue };
            match self.record.session.close(connection) {
                Ok(()) => self.record.closed = true,
                Err(error) => {
                    self.failed(&error);
                    std::thread::sleep(RECONNECT_EVERY);
                }
            }
        }
        self.record.reconnects = self.connected.saturating_sub(1);
        self.record
    }

    /// Whether there is a connection now, the session open on it.
    pub(super) fn connect(&mut self) -> bool {
        let Pace { connect_at_most, reply_at_most, .. } = self.pace;
        match Connection::open(self.server, connect_at_most, reply_at_most) {
            Ok(mut connection) => {
                let sent = Instant::now();
                match self.record.session.open(&mut connection) {
                    Ok(()) => {
                        self.progress.answer(sent);
                        self.connection = Some(connection);
                        self.connected += 1;
                    }
                    Err(error) => self.failed(&error),
                }
            }
            Err(_) => self.record.refused += 1,
        }
        self.connection.is_some()
    }

    fn request(&mut self, due: Instant) {
        let sent = Instant::now();
        let asked = self.ask();
        let result = asked.and_then(|()| self.take());
        self.note(due, sent, result);
    }

    /// Sends the next request.
    pub(super) fn ask(&mut self) -> Result<(), ClientError> {
        self.words.clear();
        self.record.session.ask(&mut self.words);
        let connection = self.connection.as_mut().ok_or_else(no_connection)?;
        connection.send(&self.words)
    }

    /// Takes the reply to it.
    pub(super) fn take(&mut self) -> Result<(), ClientError> {
        let connection = self.connection.as_mut().ok_or_else(no_connection)?;
        let taken = self.record.session.take(connection);
        if matches!(taken, Err(ClientError::Unfinished)) {
            connection.rewind();
        }
        taken
    }

    /// What became of a request.
    pub(super) fn note(&mut self, due: Instant, sent: Instant, result: Result<(), ClientError>) {
        let done = Instant::now();
        let outcome = match &result {
            Ok(()) => Outcome::Good,
            Err(ClientError::Wrong(_)) => Outcome::Wrong,
            Err(ClientError::Timeout) => Outcome::Timeout,
            Err(ClientError::Connect(_) | ClientError::Lost(_) | ClientError::Unfinished) => {
                Outcome::Lost
            }
        };
        self.record.replies.push(Reply { due, sent, done, outcome });
        match result {
            Ok(()) => self.progress.answer(sent),
            Err(error) => {
                self.record.session.give_up();
                self.failed(&error);
            }
        }
    }

    pub(super) fn connection(&mut self) -> Option<&mut Connection> {
        self.connection.as_mut()
    }

    /// The connection is of no more use.
    pub(super) fn failed(&mut self, error: &ClientError) {
        self.connection = None;
        if let ClientError::Wrong(said) = error
            && self.record.wrongs.len() < WRONGS_KEPT_MAX
        {
            self.record.wrongs.push(said.clone());
        }
    }
}

fn no_connection() -> ClientError {
    ClientError::Lost(std::io::ErrorKind::NotConnected.into())
}
