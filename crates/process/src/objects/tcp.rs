//! TCP sockets: listeners, connections, and what is left of dead ones.
//!
//! # What a capture costs, and why it is right while the network goes on
//!
//! The guest stands still during a capture, but its peers do not: segments arrive between two of
//! our calls. A connection is therefore read *optimistically*: one `TCP_INFO`, then the queues if
//! there is anything in them, then `TCP_INFO` again; when the counters of the two differ we read
//! again. `TCP_INFO` shows no sequence numbers, but it counts acknowledged and received bytes. So
//! the numbers are fetched in one short `TCP_REPAIR` visit when a connection is seen for the
//! first time, and from then on
//!
//! ```text
//! send_unacknowledged = known + Δ bytes_acknowledged      receive_next = known + Δ bytes_received
//! ```
//!
//! A visit selects the receive queue first and the send queue only for one getsockopt(2): while
//! the send queue is selected, an acknowledgement that arrives makes the kernel believe that it
//! sent what it did not, and the peer waits for a retransmission. It never breaks a connection.
//!
//! # Restore
//!
//! A connection is rebuilt in repair mode and stays in it, silent, until [`go_live`]. Bytes of
//! the send queue are queued only then, as not sent: the peer may have received them or not, and
//! TCP sorts that out. (More than can be sent at once counts as sent, see
//! [`TcpConnection::resends_at_once`].) What TCP cannot sort out (the peer has seen more than this
//! checkpoint
//! knows) is found and reset by the watch in `hotspare_net::go_live`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use hotspare_image::sockets::{SocketAddress, TcpConnection, TcpSocket, TcpState};
use hotspare_kernel::KernelError;
use hotspare_kernel::segment::{Segment, SegmentSender, flag};
use hotspare_kernel::socket;
use hotspare_kernel::tcp::{self, HandshakeOptions, Queue, Repair, RepairWindow, TcpInfo};

use super::error::{ObjectError, ObjectResult};
use super::socket_options::{
    Moment, OptionReader, SocketKind, option_value, refuse_upper_layer, release_buffers,
    restore_options,
};

/// Most bytes of one queue of one connection that travel; a connection with more is busy, and
/// its peer will have moved on long before a failover.
const QUEUE_BYTES_MAX: usize = 4 << 20;
/// How often a connection is read again because its peer was active meanwhile.
const ATTEMPTS_MAX: usize = 5;
/// What `TCP_MAXSEG` takes.
const MSS_MIN: u32 = 88;
const MSS_MAX: u32 = 32_767;
/// How far a restored connection's timestamps are moved ahead beyond the age of the checkpoint:
/// they must not be older than the last one sent.
const TIMESTAMP_MARGIN_MS: u32 = 10_000;

/// `TCP_ESTABLISHED` and so on (net/tcp_states.h).
mod state {
    pub const ESTABLISHED: u8 = 1;
    pub const SYN_SENT: u8 = 2;
    pub const SYN_RECEIVED: u8 = 3;
    pub const FIN_WAIT1: u8 = 4;
    pub const FIN_WAIT2: u8 = 5;
    pub const TIME_WAIT: u8 = 6;
    pub const CLOSE: u8 = 7;
    pub const CLOSE_WAIT: u8 = 8;
    pub const LAST_ACK: u8 = 9;
    pub const LISTEN: u8 = 10;
    pub const CLOSING: u8 = 11;
}

/// The peer has sent its FIN.
fn peer_closed(kernel_state: u8) -> bool {
    matches!(kernel_state, state::CLOSE_WAIT | state::LAST_ACK | state::CLOSING)
}

/// The guest has closed its direction: its FIN is sent or queued.
fn guest_closed(kernel_state: u8) -> bool {
    use state::{CLOSING, FIN_WAIT1, FIN_WAIT2, LAST_ACK};
    matches!(kernel_state, FIN_WAIT1 | FIN_WAIT2 | LAST_ACK | CLOSING)
}

/// What of a connection never changes, or can be counted on from `TCP_INFO`.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// send_unacknowledged − bytes_acknowledged, modulo 2³².
    send_base: u32,
    /// receive_next − bytes_received, modulo 2³².
    receive_base: u32,
    mss_clamp: u32,
    window_max: u32,
    /// Timestamp − clock, and how many ticks of the clock a ms has.
    timestamp: (u32, u32),
    /// Last epoch it was seen in.
    seen: u64,
}

impl Known {
    /// What a segment that leaves now would carry. The lowest bit is the unit.
    fn timestamp_now(&self) -> ObjectResult<u32> {
        let (offset, per_ms) = self.timestamp;
        Ok(ticks(per_ms)?.wrapping_add(offset) & !1 | u32::from(per_ms != 1))
    }
}

/// A connection that was seen before: what never changes.
#[derive(Clone, Debug)]
pub struct Connection {
    known: Known,
    local: SocketAddress,
    remote: SocketAddress,
}

/// `image` as it is now, nothing having happened to the socket but time.
pub fn image_now(image: &TcpSocket, connection: Option<&Connection>) -> TcpSocket {
    let mut image = image.clone();
    if let (TcpState::Connected(state), Some(connection)) = (&mut image.state, connection)
        && state.timestamp.is_some()
        && let Ok(now) = connection.known.timestamp_now()
    {
        state.timestamp = Some(now);
    }
    image
}

/// A socket as it was captured when it had a mark ([`hotspare_kernel::marks`]).
struct Marked {
    mark: Vec<u8>,
    image: TcpSocket,
    /// Last epoch it was seen in.
    seen: u64,
}

/// Sequence numbers of the connections seen in the epochs before, by inode number.
#[derive(Default)]
pub struct TcpCache {
    known: HashMap<u64, Connection>,
    marked: HashMap<u64, Marked>,
    epoch: u64,
}

impl TcpCache {
    /// A new epoch begins: connections not seen in the last one are forgotten.
    pub fn begin_epoch(&mut self) {
        let last = self.epoch;
        self.known.retain(|_, connection| connection.known.seen == last);
        self.marked.retain(|_, marked| marked.seen == last);
        self.epoch += 1;
    }

    /// Connections it knows.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether it knows none.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// A socket whose mark is the same, unless its options are to be read at this stop.
    pub fn same(
        &mut self,
        inode: u64,
        mark: &[u8],
        options: &mut OptionReader,
    ) -> Option<TcpSocket> {
        let marked = self.marked.get_mut(&inode).filter(|marked| marked.mark == mark)?;
        let connected = matches!(marked.image.state, TcpState::Connected(_));
        if !options.are_fresh(inode, connected) {
            return None;
        }
        marked.seen = self.epoch;
        let connection = self.known.get_mut(&inode);
        if connected && connection.is_none() {
            return None;
        }
        let connection = connection.map(|connection| {
            connection.known.seen = self.epoch;
            &*connection
        });
        Some(image_now(&marked.image, connection))
    }

    /// Forgets a socket that rests, and gives what is known of it.
    pub fn take(&mut self, inode: u64) -> Option<(TcpSocket, Option<Connection>)> {
        let image = self.marked.remove(&inode)?.image;
        Some((image, self.known.remove(&inode)))
    }

    /// A socket rests no more.
    pub fn put_back(&mut self, inode: u64, connection: Connection) {
        let known = Known { seen: self.epoch, ..connection.known };
        self.known.insert(inode, Connection { known, ..connection });
    }

    /// Keeps what was captured of a socket with this mark. Of one that has ended more may be seen
    /// at the next stop.
    pub fn note(&mut self, inode: u64, mark: &[u8], image: &TcpSocket) {
        let lasts = matches!(image.state, TcpState::Connected(_) | TcpState::Listening { .. });
        if mark.is_empty() || !lasts {
            self.marked.remove(&inode);
            return;
        }
        let marked = Marked { mark: mark.to_vec(), image: image.clone(), seen: self.epoch };
        self.marked.insert(inode, marked);
    }

    /// What is known of a connection, if need be by a visit; `None` if its peer never held still.
    fn learn(&mut self, fd: BorrowedFd<'_>, inode: u64) -> ObjectResult<Option<&mut Connection>> {
        let epoch = self.epoch;
        match self.known.entry(inode) {
            Entry::Occupied(entry) => {
                let connection = entry.into_mut();
                connection.known.seen = epoch;
                Ok(Some(connection))
            }
            Entry::Vacant(entry) => {
                refuse_upper_layer(fd)?;
                let Ok(remote) = socket::peer_address(fd) else { return Ok(None) };
                let Some(mut known) = visit(fd)? else { return Ok(None) };
                known.seen = epoch;
                let local = SocketAddress(socket::local_address(fd)?);
                let remote = SocketAddress(remote);
                Ok(Some(entry.insert(Connection { known, local, remote })))
            }
        }
    }
}

/// The clock that timestamps are made of (tcp_clock_ns), in ticks of which a ms has so many.
fn ticks(per_ms: u32) -> ObjectResult<u32> {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_err(|errno| KernelError::from_errno("read clock", errno as i32))?;
    let ns = now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64;
    Ok((ns / (1_000_000 / u64::from(per_ms))) as u32)
}

/// Fetches sequence numbers in repair mode; `None` if the peer never held still.
fn visit(fd: BorrowedFd<'_>) -> ObjectResult<Option<Known>> {
    let reuse = socket::get_option_i32(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
    for _ in 0..ATTEMPTS_MAX {
        let before = tcp::info(fd)?;
        let repair = Repair::enter(fd)?;
        repair.select(Queue::Receive)?;
        let receive_next = repair.sequence()?;
        repair.select(Queue::Send)?;
        let written = repair.sequence();
        repair.select(Queue::None)?;
        let queued = socket::outgoing_bytes(fd)? as u32;
        let mss_clamp = repair.mss_clamp()?;
        let window_max = repair.window()?.send_max;
        drop(repair);
        let after = tcp::info(fd)?;
        if counters(&before) == counters(&after) {
            socket::set_option_i32(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, reuse)?;
            let send_unacknowledged = written?.wrapping_sub(queued);
            let acknowledged = after.bytes_acknowledged as u32;
            let timestamp = tcp::timestamp(fd)?;
            let per_ms = if timestamp & 1 == 1 { 1000 } else { 1 };
            return Ok(Some(Known {
                send_base: send_unacknowledged.wrapping_sub(acknowledged),
                receive_base: receive_next.wrapping_sub(after.bytes_received as u32),
                mss_clamp,
                window_max,
                timestamp: (timestamp.wrapping_sub(ticks(per_ms)?), per_ms),
                seen: 0,
            }));
        }
    }
    socket::set_option_i32(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, reuse)?;
    Ok(None)
}

fn counters(info: &TcpInfo) -> (u8, u64, u64, u32) {
    (info.state, info.bytes_acknowledged, info.bytes_received, info.unsent_bytes)
}

/// Captures a TCP socket. The guest stands still; its network may go on.
///
/// `fd` is a duplicate of the guest's descriptor. The socket is as before afterwards.
pub fn capture(
    fd: BorrowedFd<'_>,
    kind: SocketKind,
    inode: u64,
    cache: &mut TcpCache,
    options: &mut OptionReader,
) -> ObjectResult<TcpSocket> {
    let info = tcp::info(fd)?;
    let state = match info.state {
        state::LISTEN => TcpState::Listening { backlog: info.backlog as i32 },
        state::CLOSE => closed(fd)?,
        state::SYN_SENT | state::SYN_RECEIVED => lost(fd, "it was being set up"),
        state::TIME_WAIT => lost(fd, "it had ended"),
        // A listener's connections are MPTCP only if their clients are.
        _ if kind.protocol == libc::IPPROTO_MPTCP => lost(fd, "it is an MPTCP connection"),
        state::ESTABLISHED
        | state::FIN_WAIT1
        | state::FIN_WAIT2
        | state::CLOSE_WAIT
        | state::LAST_ACK
        | state::CLOSING => connection(fd, inode, info, cache)?,
        other => return Err(KernelError::Unexpected(format!("TCP state {other}")).into()),
    };
    let connected = matches!(state, TcpState::Connected(_) | TcpState::Lost { .. });
    let local = match cache.known.get(&inode) {
        Some(connection) if connected => Some(connection.local.clone()),
        _ => bound_address(fd)?,
    };
    let options = options.capture(fd, inode, kind, connected)?;
    let SocketKind { domain: family, protocol, .. } = kind;
    Ok(TcpSocket { inode, family, local, state, options, protocol })
}

fn bound_address(fd: BorrowedFd<'_>) -> ObjectResult<Option<SocketAddress>> {
    let local = SocketAddress(socket::local_address(fd)?);
    let bound = local.internet().is_some_and(|address| address.port() != 0);
    Ok(bound.then_some(local))
}

/// A new socket can still connect; one that was connected reads as ended.
fn closed(fd: BorrowedFd<'_>) -> ObjectResult<TcpState> {
    let ended = socket::poll_now(fd, libc::POLLRDHUP)? & (libc::POLLRDHUP | libc::POLLERR) != 0;
    if ended { Ok(lost(fd, "it had ended")) } else { Ok(TcpState::Closed) }
}

fn lost(fd: BorrowedFd<'_>, reason: &str) -> TcpState {
    let remote = socket::peer_address(fd).ok().map(SocketAddress);
    TcpState::Lost { reason: reason.to_owned(), remote }
}

fn connection(
    fd: BorrowedFd<'_>,
    inode: u64,
    mut info: TcpInfo,
    cache: &mut TcpCache,
) -> ObjectResult<TcpState> {
    let Some(connection) = cache.learn(fd, inode)? else {
        return Ok(lost(fd, "its peer sent without a pause"));
    };
    for _ in 0..ATTEMPTS_MAX {
        let Some(queues) = queues(fd, &info)? else {
            return Ok(lost(fd, "more bytes were queued than a checkpoint takes"));
        };
        let again = if queues.unstable { tcp::info(fd)? } else { info };
        if again.state == state::CLOSE {
            return Ok(lost(fd, "it ended during the capture"));
        }
        if counters(&info) == counters(&again) {
            let known = &mut connection.known;
            known.window_max = known.window_max.max(info.send_window);
            let described = describe(connection, &info, queues)?;
            return Ok(TcpState::Connected(Box::new(described)));
        }
        info = again;
    }
    Ok(lost(fd, "its peer was active during the whole capture"))
}

/// Both queues; `unstable` if something was in them, so that the peer may have changed them.
struct Queues {
    unread: Vec<u8>,
    outgoing: Vec<u8>,
    unstable: bool,
}

/// Reads both queues; `None` where they are too long.
fn queues(fd: BorrowedFd<'_>, info: &TcpInfo) -> ObjectResult<Option<Queues>> {
    let waiting = socket::unread_bytes(fd)?;
    let sending = info.unacknowledged_segments > 0 || info.unsent_bytes > 0;
    let length = if sending { socket::outgoing_bytes(fd)? } else { 0 };
    if waiting > QUEUE_BYTES_MAX || length > QUEUE_BYTES_MAX {
        return Ok(None);
    }
    let unread = if waiting > 0 { tcp::peek_unread(fd)? } else { Vec::new() };
    if unread.len() < waiting {
        // Those that are missing would be missing in the stream of a ghost, which has to begin
        // behind them.
        let reason = "not all bytes that it has not read could be read (urgent data?)";
        return Err(ObjectError::transient("a TCP connection", reason));
    }
    // A FIN has a number, and no byte.
    let length = length.saturating_sub(usize::from(says_fin(info.state)));
    let outgoing = if length > 0 { peek_outgoing(fd, length)? } else { Vec::new() };
    Ok(Some(Queues { unread, outgoing, unstable: waiting > 0 || sending }))
}

/// The last `length` bytes of the send queue: those that the peer has not acknowledged. Before them
/// may be others: of a segment of which it has acknowledged a part the kernel keeps all.
fn peek_outgoing(fd: BorrowedFd<'_>, length: usize) -> ObjectResult<Vec<u8>> {
    let reuse = socket::get_option_i32(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
    let repair = Repair::enter(fd)?;
    repair.select(Queue::Send)?;
    let bytes = repair.peek(length);
    // With it the queue is selected no more: whoever enters it next begins with none.
    drop(repair);
    socket::set_option_i32(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, reuse)?;
    let mut bytes = bytes?;
    bytes.drain(..bytes.len().saturating_sub(length));
    Ok(bytes)
}

/// Whether a FIN of ours is not acknowledged.
fn says_fin(state: u8) -> bool {
    matches!(state, state::FIN_WAIT1 | state::CLOSING | state::LAST_ACK)
}

fn describe(
    connection: &Connection,
    info: &TcpInfo,
    queues: Queues,
) -> ObjectResult<TcpConnection> {
    let Connection { known, remote, .. } = connection;
    let has = |bit| info.options & bit != 0;
    let receive_next = known.receive_base.wrapping_add(info.bytes_received as u32);
    let mut sent = queues.outgoing;
    let unsent = sent.split_off(sent.len().saturating_sub(info.unsent_bytes as usize));
    let timestamp = match has(tcp::OPTION_TIMESTAMPS) {
        true => Some(known.timestamp_now()?),
        false => None,
    };
    Ok(TcpConnection {
        remote: remote.clone(),
        kernel_state: info.state,
        send_unacknowledged: known.send_base.wrapping_add(info.bytes_acknowledged as u32),
        sent,
        unsent,
        receive_next,
        unread: queues.unread,
        mss_clamp: known.mss_clamp,
        window_scales: has(tcp::OPTION_WINDOW_SCALE).then_some(info.window_scales),
        sack: has(tcp::OPTION_SACK),
        timestamp,
        window: [
            receive_next,
            info.send_window,
            known.window_max.max(info.send_window),
            info.receive_window,
            receive_next,
        ],
    })
}

/// Restores a TCP socket in the calling thread's network namespace.
///
/// A connection is left in repair mode: nothing goes out until [`go_live`]. `age_ms` is how old
/// the checkpoint may be.
pub fn restore(image: &TcpSocket, age_ms: u32) -> ObjectResult<OwnedFd> {
    match &image.state {
        TcpState::Lost { .. } => ended(image.family),
        TcpState::Closed => new_socket(image, image.local.as_ref()),
        TcpState::Listening { backlog } => {
            let fd = new_socket(image, image.local.as_ref())?;
            socket::listen(fd.as_fd(), *backlog)?;
            Ok(fd)
        }
        // One connection that cannot be made anew must not keep the others: its owner sees it end.
        TcpState::Connected(connection) => connected(image, connection, age_ms).or_else(|error| {
            tracing::warn!(%error, "a connection could not be made anew");
            ended(image.family)
        }),
    }
}

/// A socket with all its options, bound, not connected.
fn new_socket(image: &TcpSocket, local: Option<&SocketAddress>) -> ObjectResult<OwnedFd> {
    let fd = socket::create(image.family, libc::SOCK_STREAM, image.protocol)?;
    let borrowed = fd.as_fd();
    prepare_bind(borrowed, image.family)?;
    restore_options(borrowed, &image.options, Moment::Created)?;
    if let Some(local) = local {
        let bound = socket::bind(borrowed, &local.0);
        bound.map_err(ObjectError::kernel(format!("bind {:?}", local.internet())))?;
    }
    let (level, name) = (libc::SOL_SOCKET, libc::SO_REUSEADDR);
    if option_value(&image.options, level, name).is_none() {
        socket::set_option_i32(borrowed, level, name, 0)?;
    }
    finish_options(borrowed, image, false)?;
    Ok(fd)
}

/// Lets bind(2) succeed beside other sockets and, as connect(2), before the address is there.
fn prepare_bind(fd: BorrowedFd<'_>, family: i32) -> ObjectResult<()> {
    socket::set_option_i32(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    set_transparent(fd, family, 1)
}

/// One flag of the kernel's behind both options. MPTCP sockets may not know it.
fn set_transparent(fd: BorrowedFd<'_>, family: i32, value: i32) -> ObjectResult<()> {
    let (level, name) = match family {
        libc::AF_INET6 => (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT),
        _ => (libc::IPPROTO_IP, libc::IP_TRANSPARENT),
    };
    match socket::set_option_i32(fd, level, name, value) {
        Err(error) if !socket::is_unknown_option(&error) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Undoes [`prepare_bind`] and gives every option its value. `forced`: queues were filled, so
/// that buffers were sized by force.
fn finish_options(fd: BorrowedFd<'_>, image: &TcpSocket, forced: bool) -> ObjectResult<()> {
    let (level, name) = (libc::IPPROTO_IP, libc::IP_TRANSPARENT);
    if option_value(&image.options, level, name).is_none() {
        set_transparent(fd, image.family, 0)?;
    }
    if forced {
        release_buffers(fd, &image.options)?;
    }
    restore_options(fd, &image.options, Moment::InPlace)
}

fn connected(image: &TcpSocket, connection: &TcpConnection, age_ms: u32) -> ObjectResult<OwnedFd> {
    let (Some(local), Some(remote)) = (image.local.as_ref(), connection.remote.internet()) else {
        return Err(ObjectError::Image("a TCP connection without addresses".into()));
    };
    let fd = socket::create(image.family, libc::SOCK_STREAM, 0)?;
    let borrowed = fd.as_fd();
    set_transparent(borrowed, image.family, 1)?;
    // In repair mode a socket shares any port, and forgets SO_REUSEADDR when it leaves.
    let repair = Repair::enter(borrowed)?;
    restore_options(borrowed, &image.options, Moment::Created)?;
    let what = || format!("TCP connection {:?} – {remote}", local.internet());
    socket::bind(borrowed, &local.0).map_err(ObjectError::kernel(what()))?;
    let numbers = Numbers::of(connection);
    repair.select(Queue::Send)?;
    repair.set_sequence(numbers.send)?;
    repair.select(Queue::Receive)?;
    repair.set_sequence(numbers.receive.wrapping_sub(connection.unread.len() as u32))?;
    // Otherwise segments are as small as the peer's option would be missing, for a long time.
    let (level, name) = (libc::IPPROTO_TCP, libc::TCP_MAXSEG);
    let mss = connection.mss_clamp.clamp(MSS_MIN, MSS_MAX) as i32;
    socket::set_option_i32(borrowed, level, name, mss)?;
    socket::connect(borrowed, &connection.remote.0).map_err(ObjectError::kernel(what()))?;
    socket::set_option_i32(borrowed, level, name, 0)?;
    repair.set_handshake(HandshakeOptions {
        mss_clamp: connection.mss_clamp,
        window_scales: connection.window_scales,
        sack: connection.sack,
        timestamps: connection.timestamp.is_some(),
    })?;
    if let Some(timestamp) = connection.timestamp {
        repair.set_timestamp(later(timestamp, age_ms))?;
    }
    fill_unread(&repair, borrowed, &connection.unread)?;
    let [_, _, send_max, receive, _] = connection.window;
    let send = connection.send_window();
    let send_max = send_max.max(send);
    let (changed_at, told_at) = (numbers.receive, numbers.receive);
    let window = RepairWindow { changed_at, send, send_max, receive, told_at };
    repair.set_window(window).map_err(ObjectError::kernel(what()))?;
    if !connection.resends_at_once(tcp::info(borrowed)?.congestion_window) {
        fill_sent(&repair, borrowed, &connection.sent)?;
    }
    repair.select(Queue::None)?;
    repair.keep();
    Ok(fd)
}

/// Sequence numbers without the FINs, which are sent and received again after [`go_live`].
struct Numbers {
    send: u32,
    receive: u32,
}

impl Numbers {
    fn of(connection: &TcpConnection) -> Self {
        // In FIN_WAIT2 the peer has acknowledged our FIN, which took a number.
        let fin_acknowledged = connection.kernel_state == state::FIN_WAIT2;
        let fin_received = peer_closed(connection.kernel_state);
        Self {
            send: connection.send_unacknowledged.wrapping_sub(u32::from(fin_acknowledged)),
            receive: connection.receive_next.wrapping_sub(u32::from(fin_received)),
        }
    }
}

/// The timestamp `age_ms` and a margin later. Its lowest bit says whether it counts µs.
fn later(timestamp: u32, age_ms: u32) -> u32 {
    let ticks_per_ms = if timestamp & 1 == 1 { 1000 } else { 1 };
    let ahead = age_ms.saturating_add(TIMESTAMP_MARGIN_MS).saturating_mul(ticks_per_ms);
    timestamp.wrapping_add(ahead & !1)
}

fn fill_unread(repair: &Repair<'_>, fd: BorrowedFd<'_>, mut bytes: &[u8]) -> ObjectResult<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let room = socket::get_option_i32(fd, libc::SOL_SOCKET, libc::SO_RCVBUF)?;
    let needed = bytes.len().saturating_mul(2).min(i32::MAX as usize / 2) as i32;
    if room < needed {
        let name = libc::SO_RCVBUFFORCE;
        socket::set_option_i32(fd, libc::SOL_SOCKET, name, needed)?;
    }
    repair.select(Queue::Receive)?;
    while !bytes.is_empty() {
        let part = &bytes[..bytes.len().min(32 << 10)];
        let taken = repair.append(part).map_err(ObjectError::kernel("refill receive queue"))?;
        bytes = &bytes[taken..];
    }
    Ok(())
}

/// Puts bytes into the send queue as if they had been sent.
fn fill_sent(repair: &Repair<'_>, fd: BorrowedFd<'_>, mut bytes: &[u8]) -> ObjectResult<()> {
    make_room(fd, bytes.len())?;
    repair.select(Queue::Send)?;
    while !bytes.is_empty() {
        let taken = repair.append(bytes).map_err(ObjectError::kernel("refill send queue"))?;
        bytes = &bytes[taken..];
    }
    Ok(())
}

/// Makes the send buffer large enough for `bytes`; [`finish_options`] takes it back.
fn make_room(fd: BorrowedFd<'_>, bytes: usize) -> ObjectResult<()> {
    let room = socket::get_option_i32(fd, libc::SOL_SOCKET, libc::SO_SNDBUF)?;
    let needed = bytes.saturating_mul(3).min(i32::MAX as usize / 2) as i32;
    if room < needed {
        socket::set_option_i32(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, needed)?;
    }
    Ok(())
}

/// Lets a restored socket go: it answers its peer from now on, and sends what was queued.
///
/// To be called when the service address is there, before the guest runs. Other states than
/// connections need nothing. [`say_goodbye`] comes when all connections are live.
pub fn go_live(image: &TcpSocket, fd: BorrowedFd<'_>) -> ObjectResult<()> {
    let TcpState::Connected(connection) = &image.state else { return Ok(()) };
    let outgoing = [&connection.sent[..], &connection.unsent[..]].concat();
    if !outgoing.is_empty() {
        make_room(fd, outgoing.len())?;
    }
    let first_flight = tcp::info(fd)?.congestion_window;
    let as_sent = if connection.resends_at_once(first_flight) { 0 } else { connection.sent.len() };
    Repair::resume(fd).go_live()?;
    let mut rest = &outgoing[as_sent..];
    while !rest.is_empty() {
        let taken = socket::send(fd, rest, libc::MSG_DONTWAIT);
        rest = &rest[taken.map_err(ObjectError::kernel("refill send queue"))?..];
    }
    finish_options(fd, image, !outgoing.is_empty() || !connection.unread.is_empty())
}

/// Closes again what was closed: the peer's direction if `sender` is to say it for the peer, and
/// the guest's.
pub fn say_goodbye(
    image: &TcpSocket,
    fd: BorrowedFd<'_>,
    sender: Option<&SegmentSender>,
) -> ObjectResult<()> {
    let TcpState::Connected(connection) = &image.state else { return Ok(()) };
    if let Some(sender) = sender.filter(|_| peer_closed(connection.kernel_state)) {
        repeat_peer_fin(image, connection, sender)?;
    }
    if guest_closed(connection.kernel_state) {
        socket::shutdown(fd, libc::SHUT_WR)?;
    }
    Ok(())
}

/// The peer's FIN came before the checkpoint and will not come again: we say it for the peer.
fn repeat_peer_fin(
    image: &TcpSocket,
    connection: &TcpConnection,
    sender: &SegmentSender,
) -> ObjectResult<()> {
    let Some((to, from)) = addresses(image) else { return Ok(()) };
    let numbers = Numbers::of(connection);
    let scale = connection.window_scales.map_or(0, |(peer, _)| peer);
    let window = connection.window[1].checked_shr(u32::from(scale)).unwrap_or(0);
    let segment = Segment {
        from,
        to,
        sequence: numbers.receive,
        acknowledgement: numbers.send,
        flags: flag::FIN | flag::ACK,
        window: window.min(u32::from(u16::MAX)) as u16,
        payload_bytes: 0,
    };
    sender.send(&segment).map_err(ObjectError::kernel("repeat the peer's FIN"))?;
    Ok(())
}

/// The other end of a half-closed connection whose owner in the guest is gone: the kernel kept it
/// to the end, in no descriptor. `None` where the peer is on another host.
pub fn abandoned_peer(image: &TcpSocket) -> Option<TcpSocket> {
    let TcpState::Connected(connection) = &image.state else { return None };
    let (local, remote) = addresses(image)?;
    let inside = remote.ip().is_loopback() || remote.ip() == local.ip();
    if !inside || !peer_closed(connection.kernel_state) {
        return None;
    }
    let numbers = Numbers::of(connection);
    let [_, send, send_max, receive, _] = connection.window;
    let mirrored = TcpConnection {
        remote: image.local.clone()?,
        kernel_state: state::ESTABLISHED,
        send_unacknowledged: numbers.receive,
        receive_next: numbers.send,
        mss_clamp: connection.mss_clamp,
        window_scales: connection.window_scales.map(|(theirs, ours)| (ours, theirs)),
        sack: connection.sack,
        timestamp: connection.timestamp,
        window: [numbers.send, receive, receive.max(send_max), send.max(1), numbers.send],
        ..TcpConnection::default()
    };
    Some(TcpSocket {
        inode: 0,
        family: image.family,
        local: Some(connection.remote.clone()),
        state: TcpState::Connected(Box::new(mirrored)),
        options: Vec::new(),
        protocol: libc::IPPROTO_TCP,
    })
}

/// Local and remote address of a connection, alive or lost.
pub fn addresses(image: &TcpSocket) -> Option<(SocketAddr, SocketAddr)> {
    let remote = match &image.state {
        TcpState::Connected(connection) => Some(&connection.remote),
        TcpState::Lost { remote, .. } => remote.as_ref(),
        TcpState::Closed | TcpState::Listening { .. } => None,
    };
    Some((image.local.as_ref()?.internet()?, remote?.internet()?))
}

/// A socket whose connection was reset by its peer: reads give `ECONNRESET`, then end of file.
///
/// Made of a real connection on the loopback interface of the calling thread's namespace, so
/// that nothing of the lost connection's addresses is left in the kernel: when the peer sends
/// again, the kernel itself answers with a reset.
fn ended(family: i32) -> ObjectResult<OwnedFd> {
    let what = "stand-in for a lost connection (is the loopback interface up?)";
    let loopback: SocketAddress = match family {
        libc::AF_INET6 => SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, 0)).into(),
        _ => SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, 0)).into(),
    };
    let listener = socket::create(family, libc::SOCK_STREAM, 0)?;
    socket::bind(listener.as_fd(), &loopback.0).map_err(ObjectError::kernel(what))?;
    socket::listen(listener.as_fd(), 1)?;
    let address = socket::local_address(listener.as_fd())?;
    let fd = socket::create(family, libc::SOCK_STREAM, 0)?;
    socket::connect(fd.as_fd(), &address).map_err(ObjectError::kernel(what))?;
    let peer = socket::accept(listener.as_fd())?;
    let at_once = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    socket::set_option(peer.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &at_once)?;
    drop(peer);
    let events = socket::poll_for(fd.as_fd(), libc::POLLIN, 1000)?;
    if events & libc::POLLERR == 0 {
        return Err(ObjectError::Image("a lost connection's stand-in was not reset".into()));
    }
    Ok(fd)
}
