"""Where a message may go: which addresses are public, which are allowed, which never are."""

import ipaddress
from collections.abc import Callable, Iterator, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Sequence[str]]
"""Host and port to addresses as text. Raises OSError when there are none."""


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


NEVER = _networks("0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "::/128", "ff00::/8")
"""No receiver lives there, whatever is allowed."""
EXPLICIT = _networks(
    *("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128"),
    *("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
)
"""Link-local and metadata services: only when that one address is listed (/32, /128)."""
PRIVATE = _networks(
    *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "::/96", "::ffff:0:0/96"),
    *("64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "fc00::/7", "fec0::/10"),
    *("::ffff:0:0:0/96", "3fff::/20", "5f00::/16"),
)
"""What Python's `is_global` gets wrong in some version, and the ranges it knows as well."""
_NAT64, _TO4, _TEREDO = _networks("64:ff9b::/96", "2002::/16", "2001::/32")
_EMBEDDED = _networks("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96")
_UNICAST = _networks("0.0.0.0/0", "2000::/3", "64:ff9b::/96")
"""What is given out to anybody at all; NAT64 is judged by the address inside."""


def refusal(address: str, allowed: Sequence[Network] = ()) -> str | None:
    """Say why no message is sent to an address; None when it may be.

    An IPv4 address inside an IPv6 one (mapped, translated, NAT64, 6to4, Teredo) is judged as well.
    """
    try:
        outer = ipaddress.ip_address(address)
    except ValueError:
        return "is no IP address"
    if getattr(outer, "scope_id", None) is not None:
        return "has a zone"
    for one in (outer, *_inner(outer)):
        if wrong := _refusal(one, allowed):
            return wrong if one is outer else f"contains {one}, which {wrong}"
    return None


def refused(addresses: Sequence[str], allowed: Sequence[Network] = ()) -> str | None:
    """Say why a host with these addresses is refused: one that may not be is enough."""
    if not addresses:
        return "has no address"
    for address in addresses:
        if wrong := refusal(address, allowed):
            return f"has address {address}, which {wrong}"
    return None


def _refusal(address: Address, allowed: Sequence[Network]) -> str | None:
    if _within(address, NEVER):
        return "no receiver can have"
    listed = [network for network in allowed if network.version == address.version]
    if _within(address, EXPLICIT):
        alone = [network for network in listed if network.num_addresses == 1]
        return None if _within(address, alone) else "is link-local or a metadata service"
    if _within(address, listed):
        return None
    # Python changed its mind about these two in 3.11.4; they are what the address inside is.
    known = address.is_global or _within(address, (_NAT64, _TO4))
    known = known and _within(address, _UNICAST)
    if not known or address.is_multicast or _within(address, PRIVATE):
        return "is private; allow_networks allows it"
    return None


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)


def _inner(address: Address) -> Iterator[ipaddress.IPv4Address]:
    """Yield the IPv4 addresses that a gateway or the kernel would find inside an IPv6 address."""
    if not isinstance(address, ipaddress.IPv6Address):
        return
    number = int(address)
    if address in _NAT64 or (number > 1 and _within(address, _EMBEDDED)):
        yield ipaddress.IPv4Address(number & 0xFFFFFFFF)
    elif address in _TO4:
        yield ipaddress.IPv4Address(number >> 80 & 0xFFFFFFFF)
    elif address in _TEREDO:
        yield ipaddress.IPv4Address(number >> 64 & 0xFFFFFFFF)
        yield ipaddress.IPv4Address(~number & 0xFFFFFFFF)
