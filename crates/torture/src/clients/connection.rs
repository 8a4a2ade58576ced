//! A TCP connection read in lines and counted bytes, with deadlines.
//!
//! It waits for what is missing of a reply, or it does not: then whoever reads a reply starts again
//! from its beginning when more has come.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::clock::Instant;

/// A line or body longer than this is a broken server.
const REPLY_BYTES_LIMIT: usize = 64 << 20;
/// Read in one go.
const READ_BYTES: usize = 16 << 10;

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
    /// More of the reply is to come, on a connection that does not wait for it.
    #[error("a part of a reply")]
    Unfinished,
}

/// A connection to a server.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    /// What was read is before `filled`; replies that were taken before `taken`.
    buffer: Vec<u8>,
    filled: usize,
    taken: usize,
    /// Where the reply begins that is being taken.
    reply: usize,
    waits: bool,
    reply_at_most: Duration,
    deadline: Instant,
    /// Of the socket.
    read_timeout: Duration,
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
        stream.set_write_timeout(Some(reply_at_most)).map_err(ClientError::Connect)?;
        stream.set_read_timeout(Some(reply_at_most)).map_err(ClientError::Connect)?;
        Ok(Connection {
            stream,
            buffer: Vec::new(),
            filled: 0,
            taken: 0,
            reply: 0,
            waits: true,
            reply_at_most,
            deadline: Instant::now() + reply_at_most,
            read_timeout: reply_at_most,
        })
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

    /// Whether it waits for replies from now on. If not, what is missing of one is
    /// [`ClientError::Unfinished`].
    pub(super) fn wait(&mut self, waits: bool) -> Result<(), ClientError> {
        self.waits = waits;
        self.stream.set_nonblocking(!waits).map_err(ClientError::Lost)
    }

    /// What has been taken of an unfinished reply is to be read again.
    pub(super) fn rewind(&mut self) {
        self.taken = self.reply;
    }

    /// When the reply to what was sent last is late.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Sends a request. The reply is due `reply_at_most` from now.
    pub fn send(&mut self, request: &[u8]) -> Result<(), ClientError> {
        self.reply = self.taken;
        self.deadline = Instant::now() + self.reply_at_most;
        if self.waits {
            return self.stream.write_all(request).map_err(lost_or_late);
        }
        let mut rest = request;
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.await_room()?,
                Err(error) => return Err(lost_or_late(error)),
            }
        }
        Ok(())
    }

    /// Until the kernel takes more.
    fn await_room(&self) -> Result<(), ClientError> {
        let left = self.deadline.since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.stream.as_fd(), PollFlags::POLLOUT)];
        match poll(&mut fds, timeout) {
            Ok(0) => Err(ClientError::Timeout),
            Ok(_) => Ok(()),
            Err(error) => Err(ClientError::Lost(error.into())),
        }
    }

    /// The next line of the reply, without CR and LF.
    pub fn line(&mut self) -> Result<&[u8], ClientError> {
        let mut searched = 0;
        loop {
            let unread = &self.buffer[self.taken..self.filled];
            if let Some(at) = unread[searched..].iter().position(|byte| *byte == b'\n') {
                let start = self.taken;
                self.taken += searched + at + 1;
                let line = &self.buffer[start..self.taken - 1];
                return Ok(line.strip_suffix(b"\r").unwrap_or(line));
            }
            searched = unread.len();
            self.fill()?;
        }
    }

    /// The next `count` bytes of the reply.
    pub fn bytes(&mut self, count: usize) -> Result<&[u8], ClientError> {
        if count > REPLY_BYTES_LIMIT {
            return Err(ClientError::Wrong(format!("a reply of {count} bytes")));
        }
        while self.filled - self.taken < count {
            self.fill()?;
        }
        self.taken += count;
        Ok(&self.buffer[self.taken - count..self.taken])
    }

    /// Reads more; forgets replies before this one.
    fn fill(&mut self) -> Result<(), ClientError> {
        let keep = if self.waits { self.taken } else { self.reply };
        if keep > 0 {
            self.buffer.copy_within(keep..self.filled, 0);
            (self.filled, self.taken, self.reply) = (self.filled - keep, self.taken - keep, 0);
        }
        if self.filled > REPLY_BYTES_LIMIT {
            return Err(ClientError::Wrong("a reply without end".to_owned()));
        }
        if self.waits {
            self.limit_read()?;
        }
        if self.buffer.len() < self.filled + READ_BYTES {
            self.buffer.resize((self.filled + READ_BYTES).next_power_of_two(), 0);
        }
        match self.stream.read(&mut self.buffer[self.filled..]) {
            Ok(0) => Err(ClientError::Lost(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => {
                self.filled += read;
                Ok(())
            }
            Err(error) if !self.waits && error.kind() == io::ErrorKind::WouldBlock => {
                Err(ClientError::Unfinished)
            }
            Err(error) => Err(lost_or_late(error)),
        }
    }

    /// The socket waits for as long as is left. Nobody notices an eighth, so it is seldom told.
    fn limit_read(&mut self) -> Result<(), ClientError> {
        let left = self.deadline.since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Timeout);
        }
        if left + left / 8 < self.read_timeout || left > self.read_timeout {
            self.stream.set_read_timeout(Some(left)).map_err(ClientError::Lost)?;
            self.read_timeout = left;
        }
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn lost_or_late(error: io::Error) -> ClientError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Timeout,
        _ => ClientError::Lost(error),
    }
}
