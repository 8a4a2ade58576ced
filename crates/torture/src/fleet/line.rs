//! One connection of a fleet: it never waits in a system call.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};

use super::{Talk, Wrong};
use crate::clock::{Instant, millis};
use crate::dice::Dice;

/// So many requests are under way on a connection at most.
const DEPTH_MAX: u64 = 4;
/// Between two connections of a caller: a port of its own is not free again for a minute.
const CALL_EVERY: Duration = Duration::from_millis(50);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(10);
const READ_BYTES: usize = 64 << 10;
/// A reply that has not come by then is looked into.
const SLOW: Duration = Duration::from_millis(1200);

/// A good reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    pub(super) sent: Instant,
    pub(super) done: Instant,
}

/// What lines have to tell of one turn.
#[derive(Debug, Default)]
pub(super) struct News {
    pub(super) replies: Vec<Answered>,
    pub(super) wrongs: Vec<Wrong>,
    pub(super) resets: Vec<String>,
    /// Who has waited for long, as its kernel sees it then.
    pub(super) slow: Vec<String>,
    buffer: Vec<u8>,
}

enum State {
    /// Not connected; to be tried again at this instant.
    Closed(Instant),
    Connecting(TcpStream, Instant),
    Open(TcpStream),
}

pub(super) struct Line {
    server: SocketAddr,
    talk: Box<dyn Talk>,
    patience: Duration,
    /// After so many replies it hangs up and calls again.
    calls: Option<u64>,
    dice: Dice,
    state: State,
    opened: Instant,
    outgoing: Vec<u8>,
    written: usize,
    heard: Vec<u8>,
    /// When requests were asked that have no reply.
    asked: VecDeque<Instant>,
    /// It has been told that the oldest of these waits for long.
    told_slow: bool,
    depth: usize,
    /// When it asks next, at a steady rate.
    pub(super) due: Instant,
    pub(super) last_asked: Instant,
    /// When the last request was asked that has a reply.
    pub(super) answered: Instant,
}

impl Line {
    pub(super) fn new(
        server: SocketAddr,
        talk: Box<dyn Talk>,
        patience: Duration,
        calls: bool,
        mut dice: Dice,
    ) -> Line {
        let depth = 1 + dice.below(DEPTH_MAX) as usize;
        Line {
            server,
            talk,
            patience,
            calls: calls.then_some(1),
            dice,
            state: State::Closed(Instant::now()),
            opened: Instant::default(),
            outgoing: Vec::new(),
            written: 0,
            heard: Vec::new(),
            asked: VecDeque::new(),
            told_slow: false,
            depth,
            due: Instant::default(),
            last_asked: Instant::default(),
            answered: Instant::default(),
        }
    }

    pub(super) fn stream(&self) -> Option<&TcpStream> {
        match &self.state {
            State::Closed(_) => None,
            State::Connecting(stream, _) | State::Open(stream) => Some(stream),
        }
    }

    pub(super) fn wants(&self) -> PollFlags {
        match self.state {
            State::Open(_) if self.written == self.outgoing.len() => PollFlags::POLLIN,
            State::Open(_) => PollFlags::POLLIN | PollFlags::POLLOUT,
            State::Connecting(..) => PollFlags::POLLOUT,
            State::Closed(_) => PollFlags::empty(),
        }
    }

    /// Asks, unless too much is under way.
    pub(super) fn ask(&mut self, now: Instant) {
        if self.asked.len() < self.depth && matches!(self.state, State::Open(_)) {
            self.talk.ask(&mut self.outgoing);
            self.asked.push_back(now);
            self.last_asked = now;
        }
    }

    /// Asks if nothing is under way.
    pub(super) fn ask_if_free(&mut self, now: Instant) {
        if self.asked.is_empty() {
            self.ask(now);
        }
    }

    /// Does what can be done now.
    pub(super) fn turn(&mut self, ready: PollFlags, now: Instant, news: &mut News) {
        match &self.state {
            State::Closed(again) if *again <= now => self.connect(now, news),
            State::Closed(_) => {}
            State::Connecting(stream, since) => {
                let late = *since + self.patience < now;
                let slow = *since + SLOW < now;
                let failed = stream.take_error().ok().flatten();
                if let Some(error) = failed {
                    self.broken(&format!("connect: {error}"), now, news);
                } else if ready.contains(PollFlags::POLLOUT) {
                    self.opened(now);
                } else if late {
                    self.late("no connection", now, news);
                } else if slow && !std::mem::replace(&mut self.told_slow, true) {
                    news.slow.push(self.slow(now));
                }
            }
            State::Open(_) => self.speak(ready, now, news),
        }
    }

    fn speak(&mut self, ready: PollFlags, now: Instant, news: &mut News) {
        let spoken = match ready.is_empty() {
            true => Ok(()),
            false => self.read(now, news),
        };
        if let Err(error) = spoken.and_then(|()| self.write()) {
            return self.broken(&error.to_string(), now, news);
        }
        if self.asked.front().is_some_and(|asked| *asked + self.patience < now) {
            return self.late("no reply", now, news);
        }
        let slow = self.asked.front().is_some_and(|asked| *asked + SLOW < now);
        if slow && !std::mem::replace(&mut self.told_slow, true) {
            news.slow.push(self.slow(now));
        }
        if let Some(left) = self.calls
            && left == 0
            && self.asked.is_empty()
        {
            self.calls = Some(1 + self.dice.below(3));
            self.state = State::Closed(now + CALL_EVERY);
        }
    }

    fn connect(&mut self, now: Instant, news: &mut News) {
        let family = match self.server {
            SocketAddr::V4(_) => AddressFamily::Inet,
            SocketAddr::V6(_) => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let begun = socket(family, SockType::Stream, flags, None).and_then(|fd| {
            let to = SockaddrStorage::from(self.server);
            match connect(fd.as_raw_fd(), &to) {
                Ok(()) | Err(Errno::EINPROGRESS) => Ok(TcpStream::from(fd)),
                Err(error) => Err(error),
            }
        });
        match begun {
            Ok(stream) => {
                // Without, it is slower and nothing else.
                let _ = stream.set_nodelay(true);
                self.state = State::Connecting(stream, now);
            }
            Err(error) => self.broken(&format!("connect: {error}"), now, news),
        }
    }

    fn opened(&mut self, now: Instant) {
        self.opened = now;
        self.told_slow = false;
        self.talk.begins_anew();
        self.outgoing.clear();
        self.written = 0;
        self.heard.clear();
        self.asked.clear();
        // What was asked on the connection before has no reply, and will have none.
        self.last_asked = self.answered;
        self.state = match std::mem::replace(&mut self.state, State::Closed(now)) {
            State::Connecting(stream, _) | State::Open(stream) => State::Open(stream),
            closed @ State::Closed(_) => closed,
        };
    }

    fn write(&mut self) -> std::io::Result<()> {
        let State::Open(stream) = &mut self.state else { return Ok(()) };
        while self.written < self.outgoing.len() {
            match stream.write(&self.outgoing[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.outgoing.clear();
        self.written = 0;
        Ok(())
    }

    fn read(&mut self, now: Instant, news: &mut News) -> std::io::Result<()> {
        let State::Open(stream) = &mut self.state else { return Ok(()) };
        news.buffer.resize(READ_BYTES, 0);
        loop {
            match stream.read(&mut news.buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.heard.extend_from_slice(&news.buffer[..count]);
                    if count < READ_BYTES {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        self.hear(now, news);
        Ok(())
    }

    fn hear(&mut self, now: Instant, news: &mut News) {
        let mut taken = 0;
        while let Some(sent) = self.asked.front().copied() {
            let Some((length, judged)) = self.talk.hear(&self.heard[taken..]) else { break };
            taken += length;
            self.asked.pop_front();
            self.told_slow = false;
            self.answered = self.answered.max(sent);
            news.replies.push(Answered { sent, done: now });
            self.calls = self.calls.map(|left| left.saturating_sub(1));
            if let Err(wrong) = judged {
                news.wrongs.push(wrong);
            }
        }
        self.heard.drain(..taken);
        if self.asked.is_empty() && !self.heard.is_empty() {
            let said = String::from_utf8_lossy(&self.heard[..self.heard.len().min(60)]);
            news.wrongs.push(Wrong::Error(format!("{said:?} in reply to nothing")));
            self.heard.clear();
        }
    }

    fn broken(&mut self, why: &str, now: Instant, news: &mut News) {
        let (port, under_way) = (self.port(), self.asked.len());
        let (who, heard) = (self.who(now), self.heard.len());
        news.resets.push(format!(
            "{who} (port {port}) broke, {under_way} requests under way, {heard} bytes of the next \
             reply are here: {why}"
        ));
        self.state = State::Closed(now + RETRY);
    }

    fn late(&mut self, what: &str, now: Instant, news: &mut News) {
        let (port, patience) = (self.port(), self.patience);
        let who = self.who(now);
        news.wrongs.push(Wrong::Error(format!("{who} (port {port}): {what} in {patience:?}")));
        self.state = State::Closed(now + RETRY);
    }

    /// How the connection stands, for somebody who wants to know why it is slow.
    fn slow(&self, now: Instant) -> String {
        use hotspare_kernel::tcp::info;
        use std::os::fd::AsFd;
        let (who, port) = (self.who(now), self.port());
        let stands = match self.stream().map(|stream| info(stream.as_fd())) {
            Some(Ok(info)) => format!(
                "{} segments unacknowledged, sent again {} times, each after {} ms; {} bytes \
                 unsent, {} received, a window of {}",
                info.unacknowledged_segments,
                info.retransmits,
                info.retransmit_after_us / 1000,
                info.unsent_bytes,
                info.bytes_received,
                info.send_window
            ),
            _ => "its state is not known".to_owned(),
        };
        let (asked, heard) = (self.asked.len(), self.heard.len());
        format!("{who} (port {port}), {asked} requests under way, {heard} bytes heard: {stands}")
    }

    fn who(&self, now: Instant) -> String {
        let kind = if self.calls.is_some() { "a caller" } else { "a held connection" };
        match &self.state {
            State::Open(_) => {
                format!("{kind}, open for {:.0} ms", millis(now.since(self.opened)))
            }
            State::Connecting(..) | State::Closed(_) => format!("{kind}, about to connect"),
        }
    }

    fn port(&self) -> u16 {
        let local = self.stream().and_then(|stream| stream.local_addr().ok());
        local.map_or(0, |address| address.port())
    }
}
