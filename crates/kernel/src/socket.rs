//! Sockets of any kind: options, addresses, messages with their ancillary data.
//!
//! Addresses are the bytes of the kernel's `struct sockaddr`, family first, exactly as long as
//! the kernel says: for AF_UNIX the length is part of the name.

use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::error::{KernelError, Result, check};

/// Most descriptors one message can carry (`SCM_MAX_FD`).
pub const FILES_PER_MESSAGE_MAX: usize = 253;
/// Bytes of `struct sockaddr_storage`.
const ADDRESS_BYTES_MAX: usize = size_of::<libc::sockaddr_storage>();

/// Takes ownership of a descriptor that the kernel has just returned.
fn own(fd: libc::c_long) -> OwnedFd {
    // SAFETY: callers pass a descriptor the kernel has just given to this process.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

/// socket(2), close-on-exec.
pub fn create(domain: i32, kind: i32, protocol: i32) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol) };
    Ok(own(check("create socket", fd.into())?))
}

/// socketpair(2), close-on-exec.
pub fn pair(domain: i32, kind: i32) -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0i32; 2];
    // SAFETY: `fds` has room for two descriptors.
    let ret = unsafe { libc::socketpair(domain, kind | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()) };
    check("create socket pair", ret.into())?;
    Ok((own(fds[0].into()), own(fds[1].into())))
}

/// getsockopt(2) into `value`; how many bytes the kernel wrote.
pub fn get_option(fd: BorrowedFd<'_>, level: i32, name: i32, value: &mut [u8]) -> Result<usize> {
    let mut length = value.len() as libc::socklen_t;
    let pointer = value.as_mut_ptr().cast();
    // SAFETY: `pointer` and `length` describe the caller's buffer.
    let ret = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, pointer, &mut length) };
    check("get socket option", ret.into())?;
    Ok(length as usize)
}

/// A socket option that is an `int`.
pub fn get_option_i32(fd: BorrowedFd<'_>, level: i32, name: i32) -> Result<i32> {
    let mut value = [0u8; 4];
    get_option(fd, level, name, &mut value)?;
    Ok(i32::from_ne_bytes(value))
}

/// `SO_PEERCRED`: process, user and group at the other end; `None` where there never was one.
pub fn peer_credentials(fd: BorrowedFd<'_>) -> Result<Option<(i32, u32, u32)>> {
    let mut value = [0u8; 12];
    get_option(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut value)?;
    let word = |at: usize| value[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
    let (pid, uid, gid) = (word(0) as i32, word(4), word(8));
    Ok((uid != u32::MAX).then_some((pid, uid, gid)))
}

/// A socket option that is a `u64` (`SO_COOKIE`).
pub fn get_option_u64(fd: BorrowedFd<'_>, level: i32, name: i32) -> Result<u64> {
    let mut value = [0u8; 8];
    get_option(fd, level, name, &mut value)?;
    Ok(u64::from_ne_bytes(value))
}

/// setsockopt(2).
pub fn set_option(fd: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> Result<()> {
    let length = value.len() as libc::socklen_t;
    let pointer = value.as_ptr().cast();
    // SAFETY: `pointer` and `length` describe the caller's buffer, which is only read.
    let ret = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, pointer, length) };
    check("set socket option", ret.into()).map(drop)
}

/// Sets a socket option that is an `int`.
pub fn set_option_i32(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> Result<()> {
    set_option(fd, level, name, &value.to_ne_bytes())
}

/// Attaches a classic BPF filter (`SO_ATTACH_FILTER`), given as `struct sock_filter` bytes.
pub fn attach_filter(fd: BorrowedFd<'_>, program: &[u8]) -> Result<()> {
    let count = program.len() / size_of::<libc::sock_filter>();
    let header = libc::sock_fprog { len: count as u16, filter: program.as_ptr() as *mut _ };
    let pointer = (&raw const header).cast();
    let length = size_of::<libc::sock_fprog>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
    // SAFETY: `header` points at `count` instructions that outlive the call; both are only read.
    let ret = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, pointer, length) };
    check("attach socket filter", ret.into()).map(drop)
}

/// The classic BPF filter of a socket as `struct sock_filter` bytes; empty for none. An eBPF
/// program cannot be read back: `EACCES`.
pub fn filter(fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    let mut count: libc::socklen_t = 0;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
    let null = std::ptr::null_mut();
    // SAFETY: with length 0 the kernel writes nothing but the count.
    let ret = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, null, &mut count) };
    check("get socket filter", ret.into())?;
    let mut program = vec![0u8; count as usize * size_of::<libc::sock_filter>()];
    if program.is_empty() {
        return Ok(program);
    }
    let pointer = program.as_mut_ptr().cast();
    // SAFETY: here the length counts instructions, and the buffer holds that many.
    let ret = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, pointer, &mut count) };
    check("get socket filter", ret.into())?;
    Ok(program)
}

type NameCall = unsafe extern "C" fn(i32, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn address(fd: BorrowedFd<'_>, verb: &'static str, call: NameCall) -> Result<Vec<u8>> {
    let mut bytes = vec![0u8; ADDRESS_BYTES_MAX];
    let mut length = ADDRESS_BYTES_MAX as libc::socklen_t;
    // SAFETY: `bytes` and `length` describe a buffer large enough for any address.
    let ret = unsafe { call(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), &mut length) };
    check(verb, ret.into())?;
    bytes.truncate(length as usize);
    Ok(bytes)
}

/// getsockname(2).
pub fn local_address(fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    address(fd, "get socket's address", libc::getsockname)
}

/// getpeername(2); `ENOTCONN` where there is no peer.
pub fn peer_address(fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    address(fd, "get peer's address", libc::getpeername)
}

/// bind(2).
pub fn bind(fd: BorrowedFd<'_>, address: &[u8]) -> Result<()> {
    let length = address.len() as libc::socklen_t;
    // SAFETY: pointer and length describe the caller's bytes, which are only read.
    let ret = unsafe { libc::bind(fd.as_raw_fd(), address.as_ptr().cast(), length) };
    check("bind socket", ret.into()).map(drop)
}

/// connect(2).
pub fn connect(fd: BorrowedFd<'_>, address: &[u8]) -> Result<()> {
    let length = address.len() as libc::socklen_t;
    // SAFETY: pointer and length describe the caller's bytes, which are only read.
    let ret = unsafe { libc::connect(fd.as_raw_fd(), address.as_ptr().cast(), length) };
    check("connect socket", ret.into()).map(drop)
}

/// listen(2).
pub fn listen(fd: BorrowedFd<'_>, backlog: i32) -> Result<()> {
    // SAFETY: no pointer is passed.
    let ret = unsafe { libc::listen(fd.as_raw_fd(), backlog) };
    check("listen on socket", ret.into()).map(drop)
}

/// accept4(2), close-on-exec.
pub fn accept(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let (address, length) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: null pointers ask for no address.
    let ret = unsafe { libc::accept4(fd.as_raw_fd(), address, length, libc::SOCK_CLOEXEC) };
    Ok(own(check("accept connection", ret.into())?))
}

/// shutdown(2).
pub fn shutdown(fd: BorrowedFd<'_>, how: i32) -> Result<()> {
    // SAFETY: no pointer is passed.
    let ret = unsafe { libc::shutdown(fd.as_raw_fd(), how) };
    check("shut socket down", ret.into()).map(drop)
}

fn queue_ioctl(fd: BorrowedFd<'_>, request: libc::c_ulong) -> Result<usize> {
    let mut bytes: i32 = 0;
    // SAFETY: these requests write one int.
    let ret = unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut bytes) };
    check("measure socket queue", ret.into())?;
    Ok(bytes.max(0) as usize)
}

/// `SIOCINQ`: bytes to read; for datagrams the length of the first.
pub fn unread_bytes(fd: BorrowedFd<'_>) -> Result<usize> {
    queue_ioctl(fd, libc::FIONREAD)
}

/// `SIOCOUTQ`: bytes that the peer has not taken: unacknowledged (TCP), unread (AF_UNIX).
pub fn outgoing_bytes(fd: BorrowedFd<'_>) -> Result<usize> {
    queue_ioctl(fd, libc::TIOCOUTQ)
}

/// What poll(2) says at once about `events`.
pub fn poll_now(fd: BorrowedFd<'_>, events: i16) -> Result<i16> {
    poll_for(fd, events, 0)
}

/// poll(2) on one descriptor for at most `timeout_ms`; the events that are there, 0 for none.
pub fn poll_for(fd: BorrowedFd<'_>, events: i16, timeout_ms: i32) -> Result<i16> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    // SAFETY: one valid entry is passed.
    let ret = unsafe { libc::poll(&mut entry, 1, timeout_ms) };
    check("poll socket", ret.into())?;
    Ok(entry.revents)
}

/// send(2) with `flags`; bytes taken. Never raises SIGPIPE.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8], flags: i32) -> Result<usize> {
    let flags = flags | libc::MSG_NOSIGNAL;
    // SAFETY: pointer and length describe the caller's bytes, which are only read.
    let ret = unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    Ok(check("send", ret as libc::c_long)? as usize)
}

/// sendto(2).
pub fn send_to(fd: BorrowedFd<'_>, bytes: &[u8], to: &[u8]) -> Result<usize> {
    let (data, length) = (bytes.as_ptr().cast(), bytes.len());
    let (address, address_length) = (to.as_ptr().cast(), to.len() as libc::socklen_t);
    let (fd, flags) = (fd.as_raw_fd(), libc::MSG_NOSIGNAL);
    // SAFETY: both buffers belong to the caller and are only read.
    let ret = unsafe { libc::sendto(fd, data, length, flags, address, address_length) };
    Ok(check("send", ret as libc::c_long)? as usize)
}

/// recv(2) with `flags`; `None` when there is nothing now (`EAGAIN`).
pub fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8], flags: i32) -> Result<Option<usize>> {
    let (pointer, length) = (buffer.as_mut_ptr().cast(), buffer.len());
    // SAFETY: pointer and length describe the caller's buffer.
    let ret = unsafe { libc::recv(fd.as_raw_fd(), pointer, length, flags) };
    match check("receive", ret as libc::c_long) {
        Ok(bytes) => Ok(Some(bytes as usize)),
        Err(error) if error.errno() == Some(libc::EAGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A message with everything that came along.
#[derive(Debug, Default)]
pub struct Message {
    /// The bytes that fit.
    pub bytes: Vec<u8>,
    /// Sender's address; empty for none.
    pub from: Vec<u8>,
    /// Descriptors passed with it (`SCM_RIGHTS`), now ours.
    pub files: Vec<OwnedFd>,
    /// Sender's pid, uid, gid (`SCM_CREDENTIALS`), in our pid namespace.
    pub credentials: Option<(i32, u32, u32)>,
    /// `MSG_TRUNC`, `MSG_CTRUNC`, `MSG_EOR`, `MSG_OOB`.
    pub flags: i32,
}

/// Room for ancillary data: 253 descriptors, credentials, a security label.
#[repr(C, align(8))]
struct Control([u8; 2048]);

/// recvmsg(2) with `flags` into at most `capacity` bytes; `None` when there is nothing now.
/// Descriptors that come along are close-on-exec.
pub fn receive_message(fd: BorrowedFd<'_>, capacity: usize, flags: i32) -> Result<Option<Message>> {
    receive_from(fd, capacity, flags | libc::MSG_CMSG_CLOEXEC)
}

/// As [`receive_message`], from a socket that cannot pass descriptors and knows no flag for
/// them (packet(7)).
pub fn receive_from(fd: BorrowedFd<'_>, capacity: usize, flags: i32) -> Result<Option<Message>> {
    let mut bytes = vec![0u8; capacity];
    let mut from = vec![0u8; ADDRESS_BYTES_MAX];
    let mut control = Control([0; 2048]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: capacity };
    // SAFETY: all zero is a valid `msghdr`.
    let mut header: libc::msghdr = unsafe { zeroed() };
    header.msg_name = from.as_mut_ptr().cast();
    header.msg_namelen = ADDRESS_BYTES_MAX as u32;
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len();
    // SAFETY: every pointer of `header` leads to a live buffer of the length given beside it.
    let ret = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut header, flags) };
    let length = match check("receive message", ret as libc::c_long) {
        Ok(length) => length as usize,
        Err(error) if error.errno() == Some(libc::EAGAIN) => return Ok(None),
        Err(error) => return Err(error),
    };
    bytes.truncate(length.min(capacity));
    from.truncate(header.msg_namelen as usize);
    let mut message = Message { bytes, from, flags: header.msg_flags, ..Message::default() };
    take_ancillary(&control.0[..header.msg_controllen.min(2048)], &mut message);
    Ok(Some(message))
}

/// Walks `struct cmsghdr` records: length (8 bytes), level (4), type (4), data, padding to 8.
fn take_ancillary(mut control: &[u8], message: &mut Message) {
    const HEADER: usize = size_of::<libc::cmsghdr>();
    let word = |bytes: &[u8], at: usize| {
        bytes.get(at..at + 4).map_or(0, |b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
    };
    while control.len() >= HEADER {
        let length = (word(control, 0) as usize).clamp(HEADER, control.len());
        let (level, kind) = (word(control, 8), word(control, 12));
        let data = &control[HEADER..length];
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            let fds = data.chunks_exact(4).map(|fd| own(word(fd, 0).into()));
            message.files.extend(fds);
        } else if level == libc::SOL_SOCKET && kind == libc::SCM_CREDENTIALS {
            let (uid, gid) = (word(data, 4) as u32, word(data, 8) as u32);
            message.credentials = Some((word(data, 0), uid, gid));
        }
        control = &control[length.next_multiple_of(8).min(control.len())..];
    }
}

/// What to send.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outgoing<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// Where to, for a socket that is not connected.
    pub to: Option<&'a [u8]>,
    /// Descriptors to pass.
    pub files: &'a [BorrowedFd<'a>],
    /// pid, uid, gid to claim; other than our own needs `CAP_SYS_ADMIN`.
    pub credentials: Option<(i32, u32, u32)>,
}

fn put_ancillary(control: &mut Vec<u8>, kind: i32, data: &[u8]) {
    let length = size_of::<libc::cmsghdr>() + data.len();
    control.extend_from_slice(&length.to_ne_bytes());
    control.extend_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    control.extend_from_slice(&kind.to_ne_bytes());
    control.extend_from_slice(data);
    control.resize(control.len().next_multiple_of(8), 0);
}

/// sendmsg(2); bytes taken. Does not wait for room (`EAGAIN`).
pub fn send_message(fd: BorrowedFd<'_>, message: Outgoing<'_>) -> Result<usize> {
    let mut control = Vec::new();
    if !message.files.is_empty() {
        let fds: Vec<u8> =
            message.files.iter().flat_map(|file| file.as_raw_fd().to_ne_bytes()).collect();
        put_ancillary(&mut control, libc::SCM_RIGHTS, &fds);
    }
    if let Some((pid, uid, gid)) = message.credentials {
        let words = [pid.to_ne_bytes(), uid.to_ne_bytes(), gid.to_ne_bytes()];
        put_ancillary(&mut control, libc::SCM_CREDENTIALS, &words.concat());
    }
    let mut part = libc::iovec {
        iov_base: message.bytes.as_ptr() as *mut libc::c_void,
        iov_len: message.bytes.len(),
    };
    // SAFETY: all zero is a valid `msghdr`.
    let mut header: libc::msghdr = unsafe { zeroed() };
    if let Some(to) = message.to {
        header.msg_name = to.as_ptr() as *mut libc::c_void;
        header.msg_namelen = to.len() as u32;
    }
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    if !control.is_empty() {
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = control.len();
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: every pointer of `header` leads to a live buffer of the length given beside it;
    // the kernel only reads them.
    let ret = unsafe { libc::sendmsg(fd.as_raw_fd(), &header, flags) };
    Ok(check("send message", ret as libc::c_long)? as usize)
}

/// Whether `error` says that an option does not exist here.
pub fn is_unknown_option(error: &KernelError) -> bool {
    matches!(error.errno(), Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP))
}
