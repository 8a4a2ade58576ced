//! Many connections on one thread: for servers that stay, under more load than a thread for each
//! connection could make. Where clients share the processors with the server, what they use counts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use nix::errno::Errno;
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;

use super::connection::ClientError;
use super::lane::{Lane, LaneRecord, Session};
use crate::clock::Instant;

/// How late the end of the load, or a reply that does not come, is noticed.
const LOOK_EVERY_MS: u8 = 50;
const LOOK_EVERY: Duration = Duration::from_millis(LOOK_EVERY_MS as u64);
/// Taken from the kernel in one go.
const EVENTS: usize = 256;

/// Lanes that take turns on one thread. A lane whose connection breaks connects anew, and all
/// others wait for it.
pub(super) struct Crowd<S> {
    members: Vec<Member<S>>,
    epoll: Epoll,
    interval: Duration,
    /// Who has nothing in flight, by the time of the next request.
    idle: BinaryHeap<Reverse<(Instant, usize)>>,
}

struct Member<S> {
    lane: Lane<S>,
    due: Instant,
    sent: Option<Instant>,
}

impl<S: Session> Crowd<S> {
    /// `interval` is between two requests of a lane.
    pub(super) fn new(lanes: Vec<Lane<S>>, interval: Duration) -> Crowd<S> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("an epoll instance");
        let member = |lane| Member { lane, due: Instant::default(), sent: None };
        let members = lanes.into_iter().map(member).collect();
        Crowd { members, epoll, interval, idle: BinaryHeap::new() }
    }

    /// Tries to open each session until `at_most` has passed.
    pub(super) fn open_within(&mut self, at_most: Duration) {
        for number in 0..self.members.len() {
            self.members[number].lane.open_within(at_most);
            self.watch(number);
        }
    }

    /// Sends requests from `start` on, evenly spread over the lanes, until the load is stopped.
    pub(super) fn run(&mut self, start: Instant, is_stopped: impl Fn() -> bool) {
        let count = self.members.len();
        for (number, member) in self.members.iter_mut().enumerate() {
            member.due = start + self.interval.mul_f64(number as f64 / count as f64);
            self.idle.push(Reverse((member.due, number)));
        }
        let mut look = start + LOOK_EVERY;
        let mut events = [EpollEvent::empty(); EVENTS];
        while !is_stopped() {
            let now = Instant::now();
            self.send_due(now);
            if now >= look {
                self.give_up_late(now);
                look = now + LOOK_EVERY;
            }
            for event in self.wait(look, &mut events) {
                self.take(event.data() as usize);
            }
        }
    }

    /// Waits for what is in flight, then each session looks at everything a last time.
    pub(super) fn close_within(mut self, at_most: Duration) -> Vec<LaneRecord<S>> {
        for number in 0..self.members.len() {
            let Some(connection) = self.members[number].lane.connection() else { continue };
            let waits = connection.wait(true);
            if self.members[number].sent.is_some() {
                let taken = waits.and_then(|()| self.members[number].lane.take());
                self.end(number, taken);
            }
        }
        self.members.into_iter().map(|member| member.lane.close_within(at_most)).collect()
    }

    fn watch(&mut self, number: usize) {
        let Some(connection) = self.members[number].lane.connection() else { return };
        let event = EpollEvent::new(EpollFlags::EPOLLIN, number as u64);
        connection.wait(false).expect("a socket that does not wait");
        self.epoll.add(&*connection, event).expect("a socket is watched");
    }

    fn send_due(&mut self, now: Instant) {
        while let Some(Reverse((due, number))) = self.idle.peek().copied() {
            if due > now {
                return;
            }
            self.idle.pop();
            self.send(number);
        }
    }

    fn send(&mut self, number: usize) {
        let member = &mut self.members[number];
        if member.lane.connection().is_none() {
            if !member.lane.connect() {
                let again = Instant::now() + LOOK_EVERY;
                self.idle.push(Reverse((again, number)));
                return;
            }
            self.watch(number);
        }
        let member = &mut self.members[number];
        member.sent = Some(Instant::now());
        if let Err(error) = member.lane.ask() {
            self.end(number, Err(error));
            self.idle.push(Reverse((self.members[number].due, number)));
        }
    }

    /// There is something to read on a connection.
    fn take(&mut self, number: usize) {
        if self.members[number].sent.is_none() {
            // The server has closed it, or speaks unasked; the next request will show.
            let broken = ClientError::Lost(std::io::ErrorKind::UnexpectedEof.into());
            return self.members[number].lane.failed(&broken);
        }
        let taken = self.members[number].lane.take();
        if matches!(taken, Err(ClientError::Unfinished)) {
            return;
        }
        self.end(number, taken);
        let due = self.members[number].due;
        if due <= Instant::now() {
            self.send(number);
        } else {
            self.idle.push(Reverse((due, number)));
        }
    }

    /// Ends a request.
    fn end(&mut self, number: usize, result: Result<(), ClientError>) {
        let member = &mut self.members[number];
        if let Some(sent) = member.sent.take() {
            member.lane.note(member.due, sent, result);
            member.due = member.due + self.interval;
        }
    }

    fn give_up_late(&mut self, now: Instant) {
        for number in 0..self.members.len() {
            let member = &mut self.members[number];
            let late = member.lane.connection().is_some_and(|one| one.deadline() < now);
            if member.sent.is_some() && late {
                self.end(number, Err(ClientError::Timeout));
                self.idle.push(Reverse((self.members[number].due, number)));
            }
        }
    }

    /// Until something can be read, the next request is due, or it is time to look around.
    fn wait<'a>(
        &self,
        look: Instant,
        events: &'a mut [EpollEvent],
    ) -> impl Iterator<Item = EpollEvent> + use<'a, S> {
        let count = match self.idle.peek() {
            None => self.epoll.wait(events, LOOK_EVERY_MS),
            Some(Reverse((due, _))) => self.wait_until(look.min(*due), events),
        };
        let count = match count {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(error) => panic!("connections cannot be waited for: {error}"),
        };
        events[..count].iter().copied()
    }

    /// epoll_wait(2) counts in whole milliseconds.
    fn wait_until(&self, until: Instant, events: &mut [EpollEvent]) -> Result<usize, Errno> {
        let left = TimeSpec::from_duration(until.since(Instant::now()));
        let mut fds = [PollFd::new(self.epoll.0.as_fd(), PollFlags::POLLIN)];
        match ppoll(&mut fds, Some(left), None)? {
            0 => Ok(0),
            _ => self.epoll.wait(events, EpollTimeout::ZERO),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::clients::connection::Connection;
    use crate::clients::lane::Outcome;
    use crate::clients::{Pace, Progress};

    /// Counts, and wants to hear its numbers again.
    struct Echo {
        number: u64,
    }

    impl Session for Echo {
        fn open(&mut self, _: &mut Connection) -> Result<(), ClientError> {
            Ok(())
        }

        fn ask(&mut self, request: &mut Vec<u8>) {
            self.number += 1;
            request.extend_from_slice(format!("{}\n", self.number).as_bytes());
        }

        fn take(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
            // In two pieces, so that the first is read again when the second is late.
            let first = connection.bytes(1)?[0];
            let rest = connection.line()?;
            let said = [&[first], rest].concat();
            let is_right = said == self.number.to_string().as_bytes();
            is_right.then_some(()).ok_or_else(|| ClientError::Wrong(format!("{said:?}")))
        }

        fn close(&mut self, _: &mut Connection) -> Result<(), ClientError> {
            Ok(())
        }
    }

    /// Says lines again, byte by byte, and leaves after so many.
    fn serve(lines_at_most: usize) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answer = move |mut stream: TcpStream| {
            stream.set_nodelay(true).unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for line in lines.map_while(Result::ok).take(lines_at_most) {
                for byte in format!("{line}\n").bytes() {
                    if stream.write_all(&[byte]).is_err() {
                        return;
                    }
                    std::thread::yield_now();
                }
            }
        };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || answer(stream));
            }
        });
        address
    }

    /// Runs a crowd of three until each lane should have had some replies.
    fn run(server: SocketAddr, interval: Duration) -> Vec<LaneRecord<Echo>> {
        let at_most = Duration::from_secs(10);
        let pace = Pace { reply_at_most: at_most, ..Pace::default() };
        let progress = Arc::new(Progress::default());
        let lane = |number| Lane::new(server, pace, Echo { number }, Arc::clone(&progress));
        let mut crowd = Crowd::new([100, 200, 300].map(lane).into(), interval);
        crowd.open_within(at_most);
        let stopped = Arc::new(AtomicBool::new(false));
        let later = Arc::clone(&stopped);
        let timer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            later.store(true, Ordering::Relaxed);
        });
        crowd.run(Instant::now(), || stopped.load(Ordering::Relaxed));
        timer.join().unwrap();
        crowd.close_within(at_most)
    }

    #[test]
    fn each_lane_has_its_own_replies() {
        for record in run(serve(usize::MAX), Duration::from_nanos(1)) {
            assert!(record.replies.len() > 1, "a lane had no turn");
            assert!(record.replies.iter().all(|reply| reply.outcome == Outcome::Good));
            assert!(record.closed && record.reconnects == 0 && record.wrongs.is_empty());
        }
    }

    #[test]
    fn requests_are_due_at_their_times() {
        let interval = Duration::from_millis(10);
        for record in run(serve(usize::MAX), interval) {
            let pairs = record.replies.windows(2);
            assert!(pairs.clone().count() > 0);
            assert!(pairs.clone().all(|two| two[0].due + interval == two[1].due));
            assert!(record.replies.iter().all(|reply| reply.sent >= reply.due));
        }
    }

    #[test]
    fn a_connection_that_breaks_is_told_and_made_anew() {
        for record in run(serve(5), Duration::from_nanos(1)) {
            let good = record.replies.iter().filter(|reply| reply.outcome == Outcome::Good);
            assert!(good.count() > 5, "goes on after the first connection");
            assert!(record.replies.iter().all(|reply| reply.outcome != Outcome::Wrong));
            assert!(record.reconnects > 0);
        }
    }
}
