//! Acting as another user, on one thread.

use crate::error::{Result, check};

/// Runs `work` with effective user `uid` and group `gid` on the calling thread, capabilities kept:
/// what the kernel notes down as the maker of something is then that user.
///
/// The thread should be one that ends soon: if its own identity cannot be taken back, that is an
/// error, and the thread must not go on.
pub fn as_user<T>(uid: u32, gid: u32, work: impl FnOnce() -> T) -> Result<T> {
    if (uid, gid) == (0, 0) {
        return Ok(work());
    }
    keep_capabilities()?;
    set_effective(uid, gid)?;
    let done = work();
    set_effective(0, 0)?;
    Ok(done)
}

/// Sets `SECBIT_NO_SETUID_FIXUP` (capabilities(7)) for this thread.
fn keep_capabilities() -> Result<()> {
    const NO_SETUID_FIXUP: libc::c_long = 1 << 2;
    // SAFETY: PR_GET_SECUREBITS takes no argument.
    let bits = unsafe { libc::prctl(libc::PR_GET_SECUREBITS, 0, 0, 0, 0) };
    let bits = check("read secure bits", bits.into())?;
    // SAFETY: PR_SET_SECUREBITS takes a number.
    let ret = unsafe { libc::prctl(libc::PR_SET_SECUREBITS, bits | NO_SETUID_FIXUP, 0, 0, 0) };
    check("set secure bits", ret.into()).map(drop)
}

/// The bare calls: the wrappers of libc would change all threads.
fn set_effective(uid: u32, gid: u32) -> Result<()> {
    let keep = -1i32;
    // SAFETY: no pointer is passed.
    let ret = unsafe { libc::syscall(libc::SYS_setresgid, keep, gid, keep) };
    check("set group", ret)?;
    // SAFETY: no pointer is passed.
    let ret = unsafe { libc::syscall(libc::SYS_setresuid, keep, uid, keep) };
    check("set user", ret).map(drop)
}
