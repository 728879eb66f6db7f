"""Keep the work of tenants at their sites: which requests and jobs this gateway may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from motet_gateway.http.problems import SiteNotAllowed
from motet_gateway.storage.work_queue import Place
from motet_shared.errors import BadRequest
from motet_shared.wire import sites

from .tenant import Tenant


class TenantSites:
    """Decide for the gateway at `site`, "" if it has none.

    find: returns the tenant of jobs by its name, None if it is gone.
    """

    def __init__(self, site: str, find: Callable[[str], Tenant | None]):
        self._site, self._find = site, find

    def check(self, tenant: Tenant) -> None:
        """Raise SiteNotAllowed unless requests of the tenant may be served by this gateway."""
        if not self._is_here(tenant):
            here = f"is at {self._site!r}" if self._site else "has no site (--site)"
            raise SiteNotAllowed(
                f"sites: this key may be used at {', '.join(tenant.rights.sites)}, and this gateway {here}; "
                "send the request to a gateway there",
                param="sites",
            )

    def place(self, owner: str) -> Place:
        """Return where the jobs of a tenant may run, as seen from this gateway."""
        tenant = self._find(owner)
        if tenant is None or not tenant.rights.sites:
            return Place.ANYWHERE
        return Place.HERE if self._is_here(tenant) else Place.ELSEWHERE

    @contextmanager
    def limited(self, owner: str) -> Iterator[None]:
        """Limit what a job calls within the block to the sites of its tenant.

        Raises BadRequest if the tenant is gone, since its sites are then unknown.
        """
        tenant = self._find(owner)
        if tenant is None:
            raise BadRequest("the tenant of this job does not exist any more")
        with sites.only(tenant.rights.sites):
            yield

    def _is_here(self, tenant: Tenant) -> bool:
        names = tenant.rights.sites
        return not names or self._site in names
