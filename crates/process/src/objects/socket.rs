//! Sockets of all kinds: the one door for the table of open files.
//!
//! ```text
//! capture, per epoch:  begin_epoch ── capture ── capture ── … ── settle    (guest stopped)
//! restore:             (other files) ── restore ── address up ── go_live ── resume
//! ```

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};

use hotspare_image::objects::{FileId, FileOwner, Object, OpenFile};
use hotspare_image::sockets::{NetlinkSocket, TcpSocket, UdpSocket, UnixSocket};
use hotspare_kernel::segment::SegmentSender;
use hotspare_kernel::sock_diag::{SockDiag, UnixEntry};
use hotspare_kernel::socket;

use super::error::{ObjectError, ObjectResult};
use super::patience::Patience;
use super::restore::{RestoreContext, set_flags};
use super::socket_options::{OptionReader, Remembered, SocketKind};
use super::tcp::{self, TcpCache};
use super::unix::{self, GuestView, HostPidOf, InFlight, Made, SocketPairs, UnixRestore};
use super::{netlink, udp};

/// Kinds of sockets that are remembered; with more, all are asked again.
const KINDS_MAX: usize = 100_000;

/// What is known of a TCP socket that rests.
#[derive(Debug)]
pub struct Rest {
    image: TcpSocket,
    connection: Option<tcp::Connection>,
    options: Remembered,
}

impl Rest {
    /// Its image at this stop.
    #[must_use]
    pub fn image_now(&self) -> TcpSocket {
        tcp::image_now(&self.image, self.connection.as_ref())
    }
}

/// Captures sockets, and remembers from epoch to epoch what need not be asked again.
pub struct SocketCapture {
    tcp: TcpCache,
    options: OptionReader,
    diag: SockDiag,
    unix: Option<HashMap<u64, UnixEntry>>,
    /// What socket(2) was asked for, by inode number.
    kinds: HashMap<u64, SocketKind>,
    /// Who gets its signals, by inode number.
    owners: HashMap<u64, FileOwner>,
    not_accepted: Patience,
    exact: bool,
}

impl SocketCapture {
    /// For a guest whose network namespace is `net` (an open `/proc/PID/ns/net`).
    pub fn open(net: BorrowedFd<'_>) -> ObjectResult<Self> {
        let opened = hotspare_kernel::namespace::on_a_thread(|| {
            let net_namespace = nix::sched::CloneFlags::CLONE_NEWNET;
            nix::sched::setns(net, net_namespace).map_err(|errno| {
                hotspare_kernel::KernelError::from_errno(
                    "enter the guest's network namespace",
                    errno as i32,
                )
            })?;
            SockDiag::open()
        });
        let diag = opened.map_err(hotspare_kernel::KernelError::io("start a thread"))??;
        let (tcp, options) = (TcpCache::default(), OptionReader::default());
        let (kinds, owners, not_accepted) = Default::default();
        Ok(Self { tcp, options, diag, unix: None, kinds, owners, not_accepted, exact: false })
    }

    /// To be called at each stop, before the first capture.
    pub fn begin_epoch(&mut self) {
        self.tcp.begin_epoch();
        self.not_accepted.begin_attempt();
        self.options.begin_epoch(std::mem::take(&mut self.exact));
        self.unix = None;
        if self.kinds.len() > KINDS_MAX {
            self.kinds.clear();
        }
        if self.owners.len() > KINDS_MAX {
            self.owners.clear();
        }
    }

    /// Who gets the signals of the socket that was captured last; `ask` asks. As options it seldom
    /// changes, unless signals are sent at all.
    pub fn owner(
        &mut self,
        inode: u64,
        flags: u32,
        ask: impl FnOnce() -> ObjectResult<FileOwner>,
    ) -> ObjectResult<FileOwner> {
        let quiet = flags & libc::O_ASYNC as u32 == 0 && self.options.was_from_memory();
        if let Some(owner) = self.owners.get(&inode).filter(|_| quiet) {
            return Ok(*owner);
        }
        let owner = ask()?;
        self.owners.insert(inode, owner);
        Ok(owner)
    }

    /// A TCP socket with the mark it had when it was captured last, and who gets its signals; none
    /// where it is to be asked all the same.
    pub fn same(&mut self, inode: u64, flags: u32, mark: &[u8]) -> Option<(FileOwner, Object)> {
        let owner = *self.owners.get(&inode)?;
        if mark.is_empty() || flags & libc::O_ASYNC as u32 != 0 {
            return None;
        }
        let image = self.tcp.same(inode, mark, &mut self.options)?;
        Some((owner, Object::Tcp(image)))
    }

    /// Keeps what was captured of a socket that had this mark when the descriptors were read, all
    /// threads standing still.
    pub fn note(&mut self, inode: u64, mark: &[u8], image: &Object) {
        if let Object::Tcp(image) = image {
            self.tcp.note(inode, mark, image);
        }
    }

    /// Forgets a socket that [`SocketCapture::same`] has just given, and gives what is known of it.
    pub fn rest(&mut self, inode: u64) -> Option<Rest> {
        let options = self.options.take(inode)?;
        let (image, connection) = self.tcp.take(inode)?;
        Some(Rest { image, connection, options })
    }

    /// A socket rests no more. `due`: its options are to be read.
    pub fn wake(&mut self, rest: Rest, due: bool) {
        let inode = rest.image.inode;
        if let Some(connection) = rest.connection {
            self.tcp.put_back(inode, connection);
        }
        if !due {
            self.options.put_back(inode, rest.options);
        }
    }

    /// Whether everything is read in this epoch.
    pub fn is_exact(&self) -> bool {
        self.options.is_exact()
    }

    /// The next epoch reads everything, also what seldom changes and is otherwise read in turns:
    /// for a planned switchover.
    pub fn next_is_exact(&mut self) {
        self.exact = true;
    }

    fn kind(&mut self, fd: BorrowedFd<'_>, inode: u64) -> ObjectResult<SocketKind> {
        if let Some(kind) = self.kinds.get(&inode) {
            return Ok(*kind);
        }
        let number = |name| socket::get_option_i32(fd, libc::SOL_SOCKET, name);
        let (domain, kind) = (number(libc::SO_DOMAIN)?, number(libc::SO_TYPE)?);
        let kind = SocketKind { domain, kind, protocol: number(libc::SO_PROTOCOL)? };
        self.kinds.insert(inode, kind);
        Ok(kind)
    }

    /// Captures the socket behind `fd`, a duplicate of a descriptor of the stopped guest, whose
    /// inode number is `inode`.
    pub fn capture(
        &mut self,
        fd: BorrowedFd<'_>,
        inode: u64,
        guest: &dyn GuestView,
        in_flight: InFlight<'_>,
    ) -> ObjectResult<Object> {
        let socket_kind = self.kind(fd, inode)?;
        let SocketKind { domain, kind, protocol } = socket_kind;
        if domain == libc::AF_UNIX {
            return self.capture_unix(fd, inode, guest, in_flight);
        }
        let options = &mut self.options;
        match (domain, kind, protocol) {
            (
                libc::AF_INET | libc::AF_INET6,
                libc::SOCK_STREAM,
                libc::IPPROTO_TCP | libc::IPPROTO_MPTCP,
            ) => {
                let cache = &mut self.tcp;
                Ok(Object::Tcp(tcp::capture(fd, socket_kind, inode, cache, options)?))
            }
            (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_UDP) => {
                Ok(Object::Udp(udp::capture(fd, domain, inode, options)?))
            }
            (libc::AF_NETLINK, _, _) => {
                Ok(Object::Netlink(netlink::capture(fd, inode, socket_kind, options)?))
            }
            _ => Err(ObjectError::refused(
                format!("socket {inode}"),
                format!("{}, which we do not know how to move", family_name(domain, protocol)),
            )),
        }
    }

    fn capture_unix(
        &mut self,
        fd: BorrowedFd<'_>,
        inode: u64,
        guest: &dyn GuestView,
        in_flight: InFlight<'_>,
    ) -> ObjectResult<Object> {
        if self.unix.is_none() {
            self.unix = Some(self.diag.unix_sockets()?);
        }
        let Some(all) = &self.unix else { unreachable!("listed just now") };
        let options = &mut self.options;
        let patience = &mut self.not_accepted;
        Ok(Object::Unix(unix::capture(fd, inode, all, options, patience, guest, in_flight)?))
    }
}

/// A socket's family and protocol for people.
fn family_name(domain: i32, protocol: i32) -> String {
    let family = match domain {
        libc::AF_INET => "IPv4",
        libc::AF_INET6 => "IPv6",
        libc::AF_PACKET => "AF_PACKET (packet capture)",
        libc::AF_VSOCK => "AF_VSOCK (virtual machine sockets)",
        libc::AF_ALG => "AF_ALG (kernel cryptography)",
        libc::AF_BLUETOOTH => "AF_BLUETOOTH",
        libc::AF_CAN => "AF_CAN",
        libc::AF_XDP => "AF_XDP",
        other => return format!("a socket of family {other}, protocol {protocol}"),
    };
    match protocol {
        libc::IPPROTO_SCTP => format!("{family} SCTP"),
        libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6 => format!("{family} ping socket"),
        protocol => format!("{family} socket of protocol {protocol}"),
    }
}

/// The sockets of a checkpoint by kind.
#[derive(Default)]
struct Kinds<'a> {
    unix: Vec<(FileId, &'a UnixSocket)>,
    tcp: Vec<(FileId, &'a TcpSocket)>,
    udp: Vec<(FileId, &'a UdpSocket)>,
    netlink: Vec<(FileId, &'a NetlinkSocket)>,
}

impl<'a> Kinds<'a> {
    fn of(files: &'a [OpenFile]) -> Self {
        let mut kinds = Self::default();
        for file in files {
            match &file.object {
                Object::Unix(image) => kinds.unix.push((file.id, image)),
                Object::Tcp(image) => kinds.tcp.push((file.id, image)),
                Object::Udp(image) => kinds.udp.push((file.id, image)),
                Object::Netlink(image) => kinds.netlink.push((file.id, image)),
                Object::Regular(_)
                | Object::Directory(_)
                | Object::Pipe(_)
                | Object::EventFd(_)
                | Object::Epoll(_)
                | Object::TimerFd(_)
                | Object::SignalFd(_)
                | Object::Inotify(_)
                | Object::PidFd(_)
                | Object::Memfd(_)
                | Object::Device(_)
                | Object::Outside(_)
                | Object::MessageQueue(_)
                | Object::Proc(_) => {}
            }
        }
        kinds
    }
}

/// Completes the images of sockets when all of a checkpoint are there, those found in queues too.
/// Refuses sockets that are connected to something outside of the guest.
pub fn settle(files: &mut [OpenFile]) -> ObjectResult<()> {
    let mut sockets = Vec::new();
    for file in files {
        if let Object::Unix(image) = &mut file.object {
            sockets.push(image);
        }
    }
    unix::settle(&mut sockets)
}

/// Makes every socket of the checkpoint in the calling thread's network and mount namespaces.
///
/// `made` holds all other open files, which may travel in queues, and gets the sockets. TCP
/// connections stay silent until [`go_live`]; the service address need not be there yet, but the
/// loopback interface must be up and every peer must have a route. `pairs`: those of
/// [`unix::wanted_pairs`] that were made. Files of named AF_UNIX sockets are replaced: with a
/// directory that both hosts share, this must not be done while the guest runs elsewhere.
///
/// The thread must not share its working directory with others (`CLONE_FS`).
pub fn restore(
    files: &[OpenFile],
    context: &RestoreContext<'_>,
    pairs: SocketPairs,
    made: &mut Made,
    host_pid: HostPidOf<'_>,
) -> ObjectResult<()> {
    let kinds = Kinds::of(files);
    let (mut unix_sockets, unix) = UnixRestore::make(kinds.unix.iter().copied(), pairs, context)?;
    made.append(&mut unix_sockets);
    // Listeners first: a connection in repair mode shares any port, a listener does not.
    let (listeners, others): (Vec<_>, Vec<_>) =
        kinds.tcp.iter().copied().partition(|(_, image)| tcp::addresses(image).is_none());
    for (id, image) in listeners.into_iter().chain(others) {
        made.insert(id, tcp::restore(image, context.age_ms)?);
    }
    for (id, image) in &kinds.udp {
        made.insert(*id, udp::restore(image)?);
    }
    for (id, image) in &kinds.netlink {
        made.insert(*id, netlink::restore(image)?);
    }
    unix.finish(&kinds.unix, made, host_pid)?;
    for file in files.iter().filter(|file| is_socket(&file.object)) {
        if let Some(socket) = made.get(&file.id) {
            set_flags(socket, file.flags)?;
        }
    }
    Ok(())
}

fn is_socket(object: &Object) -> bool {
    use Object::{Netlink, Tcp, Udp, Unix};
    matches!(object, Unix(_) | Udp(_) | Tcp(_) | Netlink(_))
}

/// A peer that has moved on may reset its connection at the moment it goes live. That is the end of
/// one connection, which its owner in the guest will see, and not of the takeover.
fn ended_alone(live: ObjectResult<()>) {
    if let Err(error) = live {
        tracing::warn!(%error, "a connection ended while it went live");
    }
}

/// Lets TCP connections speak and UDP datagrams in, in the calling thread's network namespace.
/// The service address is there, the guest does not run yet. `made` are the restored files.
pub fn go_live(files: &[OpenFile], made: &Made) -> ObjectResult<()> {
    let kinds = Kinds::of(files);
    if kinds.tcp.is_empty() && kinds.udp.is_empty() {
        return Ok(());
    }
    let sender = SegmentSender::open()?;
    let mut sockets = Vec::new();
    for (id, image) in &kinds.tcp {
        let missing = || ObjectError::Image(format!("open file {id} is missing"));
        sockets.push((*image, made.get(id).ok_or_else(missing)?.as_fd()));
    }
    let ends: HashSet<_> = kinds.tcp.iter().filter_map(|(_, s)| tcp::addresses(s)).collect();
    let paired = |image: &TcpSocket| {
        tcp::addresses(image).is_some_and(|(local, remote)| ends.contains(&(remote, local)))
    };
    // Before anyone speaks: who spoke to nobody would be reset.
    let abandoned = sockets.iter().filter(|(image, _)| !paired(image));
    let abandoned = abandoned.filter_map(|(image, _)| tcp::abandoned_peer(image));
    let abandoned = abandoned.map(|peer| Ok((tcp::restore(&peer, 0)?, peer)));
    let abandoned = abandoned.collect::<ObjectResult<Vec<_>>>()?;
    for (image, fd) in &sockets {
        ended_alone(tcp::go_live(image, *fd));
    }
    for (fd, peer) in &abandoned {
        ended_alone(tcp::go_live(peer, fd.as_fd()));
    }
    for (image, fd) in &sockets {
        // A peer inside the guest says its own goodbye.
        let inside = tcp::abandoned_peer(image).is_some();
        ended_alone(tcp::say_goodbye(image, *fd, Some(&sender).filter(|_| !inside)));
    }
    drop(abandoned);
    for (_, image) in &kinds.udp {
        udp::go_live(image, &sender);
    }
    Ok(())
}
