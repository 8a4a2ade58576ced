//! A TCP connection read in lines and counted bytes, with deadlines.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::clock::Instant;

/// A line or body longer than this is a broken server.
const REPLY_BYTES_LIMIT: usize = 64 << 20;

/// Why a request has no good reply.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection in time, or refused.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// The server reset or closed the connection.
    #[error("connection lost: {0}")]
    Lost(io::Error),
    /// No reply in time.
    #[error("no reply in time")]
    Timeout,
    /// A reply came, and it is wrong. The server has broken a promise.
    #[error("wrong reply: {0}")]
    Wrong(String),
}

/// A connection to a server.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    taken: usize,
    reply_at_most: Duration,
    deadline: Instant,
}

impl Connection {
    /// Connects to `server`.
    pub fn open(
        server: SocketAddr,
        connect_at_most: Duration,
        reply_at_most: Duration,
    ) -> Result<Connection, ClientError> {
        let stream =
            TcpStream::connect_timeout(&server, connect_at_most).map_err(ClientError::Connect)?;
        stream.set_nodelay(true).map_err(ClientError::Connect)?;
        let deadline = Instant::now() + reply_at_most;
        Ok(Connection { stream, buffer: Vec::new(), taken: 0, reply_at_most, deadline })
    }

    /// Connects as soon as the server listens; gives up after `at_most`.
    pub fn open_when_it_listens(
        server: SocketAddr,
        at_most: Duration,
    ) -> Result<Connection, ClientError> {
        let deadline = Instant::now() + at_most;
        loop {
            match Connection::open(server, at_most, at_most) {
                Err(_) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                opened => return opened,
            }
        }
    }

    /// Sends a request. The reply is due `reply_at_most` from now.
    pub fn send(&mut self, request: &[u8]) -> Result<(), ClientError> {
        self.deadline = Instant::now() + self.reply_at_most;
        self.stream.set_write_timeout(Some(self.reply_at_most)).map_err(ClientError::Lost)?;
        self.stream.write_all(request).map_err(lost_or_late)
    }

    /// The next line of the reply, without CR and LF.
    pub fn line(&mut self) -> Result<&[u8], ClientError> {
        let mut searched = self.taken;
        loop {
            if let Some(at) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                let (start, end) = (self.taken, searched + at);
                self.taken = end + 1;
                let line = &self.buffer[start..end];
                return Ok(line.strip_suffix(b"\r").unwrap_or(line));
            }
            let unsearched = self.buffer.len() - self.taken;
            self.fill()?;
            searched = self.taken + unsearched;
        }
    }

    /// The next `count` bytes of the reply.
    pub fn bytes(&mut self, count: usize) -> Result<&[u8], ClientError> {
        if count > REPLY_BYTES_LIMIT {
            return Err(ClientError::Wrong(format!("a reply of {count} bytes")));
        }
        while self.buffer.len() - self.taken < count {
            self.fill()?;
        }
        self.taken += count;
        Ok(&self.buffer[self.taken - count..self.taken])
    }

    /// Reads more; forgets what was taken.
    fn fill(&mut self) -> Result<(), ClientError> {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        if self.buffer.len() > REPLY_BYTES_LIMIT {
            return Err(ClientError::Wrong("a reply without end".to_owned()));
        }
        let left = self.deadline.since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Timeout);
        }
        self.stream.set_read_timeout(Some(left)).map_err(ClientError::Lost)?;
        let start = self.buffer.len();
        self.buffer.resize(start + (16 << 10), 0);
        let read = self.stream.read(&mut self.buffer[start..]);
        self.buffer.truncate(start + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => Err(ClientError::Lost(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(()),
            Err(error) => Err(lost_or_late(error)),
        }
    }
}

fn lost_or_late(error: io::Error) -> ClientError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Timeout,
        _ => ClientError::Lost(error),
    }
}
